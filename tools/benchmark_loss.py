"""Measures the policy loss, forward and backward, against its peers: time, memory and error, side by side in one run.

    make env-bench
    python tools/benchmark_loss.py --dtype bfloat16

Every path turns the same hidden states into - mean(r * A) over the sampled tokens and gives the gradients for hidden
states and weight. Times are measured round by round, the order shuffled in each, and stated as multiples of the
floor: the three matrix products alone. Memory is the peak beyond inputs, outputs and the two gradients, each path
alone. Errors are against float64.
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from loss_benchmark.paths import BUILT_IN, LossPath, own_paths
from loss_benchmark.peers import PEERS
from loss_benchmark.report import print_table, write_report
from loss_benchmark.run import Setting, run

from megatron.rl.errors import ConfigError, UserError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 if a path raised, or 2 for a user's mistake, told in one line."""
    try:
        args = _parser().parse_args(argv)
        setting, paths = _setting(args), _paths(args)
        with warnings.catch_warnings():
            # Of optional parts that no path uses; they would break the progress line.
            warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
            outcome = run(setting, paths)
        print_table(setting, outcome)
        for path in write_report(setting, outcome, args.output):
            print(f"wrote {path}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if outcome.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="benchmark_loss.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(path.name for path in (*BUILT_IN, *PEERS))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--vocab", type=int, default=32768, help="vocabulary size")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of hidden states and weight")
    parser.add_argument("--rounds", type=int, default=9, help="times each path is timed, after one warm-up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--token-chunk", type=int, default=256, metavar="N", help="chunk of our second entry")
    parser.add_argument("--peers", metavar="A,B,C", help=f"which to measure beside ours (default: {names})")
    parser.add_argument(
        "--memory-tokens", default="1024,8192", metavar="N,N", help="token counts at which memory is measured"
    )
    parser.add_argument("--error-vocab", type=int, metavar="N", help="vocabulary for the errors (default: --vocab)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark_loss"), metavar="FOLDER")
    return parser


def _setting(args: argparse.Namespace) -> Setting:
    for name in ("tokens", "hidden", "vocab", "rounds", "token_chunk", "error_vocab"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    if args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"--output: {args.output} is a file; name a folder")
    return Setting(
        tokens=args.tokens,
        hidden=args.hidden,
        vocab=args.vocab,
        dtype=DTYPES[args.dtype],
        device=torch.device(args.device),
        rounds=args.rounds,
        memory_tokens=_token_counts(args.memory_tokens),
        error_vocab=args.error_vocab or args.vocab,
        seed=args.seed,
    )


def _token_counts(text: str) -> tuple[int, ...]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise ConfigError(f"--memory-tokens must be whole numbers from 1 on, separated by commas (got {text})")
    return tuple(counts)


def _paths(args: argparse.Namespace) -> list[LossPath]:
    known = {path.name: path for path in (*BUILT_IN, *PEERS)}
    names = list(known) if args.peers is None else [name.strip() for name in args.peers.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--peers: there is no {name!r}; choose from {', '.join(known)}")
    return [*own_paths(args.token_chunk), *(known[name] for name in dict.fromkeys(names))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
