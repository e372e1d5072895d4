"""Memory of one rank of each pipeline stage for a model, a layout and a batch, before anything is started.

    python tools/plan_memory.py --world-size 32 --gpu-memory 80 --hf-model DIR --bf16 --tensor-model-parallel-size 4 ...

All flags but the three named below are those of pretrain_rl.py, checked as it checks them. Of the model only
config.json is read. Every sequence is taken to be as long as its limit allows, and experts to be chosen evenly.
"""

import argparse
import contextlib
import math
import os
import re
import shlex
import string
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from megatron.rl.quiet import quiet_libraries

quiet_libraries()
from megatron.rl import assets, cpu_platform  # noqa: E402
from megatron.rl.errors import ConfigError, UserError  # noqa: E402

GIB = 2**30
RECIPES = Path(__file__).parents[1] / "examples" / "drpo"


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 where the plan does not fit, or 2 for a user's mistake, told in one line."""
    parser = argparse.ArgumentParser(
        prog="plan_memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="processes in all (default 1)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="what runs them (default cuda)")
    parser.add_argument("--gpu-memory", type=float, default=80, metavar="GIB", help="of one process (default 80)")
    parser.add_argument(
        "--recipe", metavar="NAME", help="plan examples/drpo/NAME.sh; flags given here win over its own"
    )
    try:
        own, flags = _parsed(parser, argv)
        return _plan(own, flags)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    def fail(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = fail  # type: ignore[method-assign, assignment]
    own, flags = parser.parse_known_args(argv)
    if own.world_size < 1:
        raise ConfigError(f"--world-size must be at least 1 (got {own.world_size})")
    if not 0 < own.gpu_memory < math.inf:
        raise ConfigError(f"--gpu-memory must be a positive number of GiB (got {own.gpu_memory})")
    return own, (recipe_flags(own.recipe) if own.recipe else []) + flags


def recipe_flags(name: str) -> list[str]:
    """The flags with which a recipe calls pretrain_rl.py, its shell variables filled in.

    Raises :class:`ConfigError` where there is no such recipe.
    """
    script = RECIPES / f"{name.removesuffix('.sh')}.sh"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.sh")))
        raise ConfigError(f"--recipe {name}: no such recipe; there are {known}")
    text = script.read_text().replace("\\\n", " ")
    variables = dict(re.findall(r"^(\w+)=(\S+)$", text, re.MULTILINE))
    _, _, command = text.rpartition("pretrain_rl.py")
    return [string.Template(word).safe_substitute(variables) for word in shlex.split(command) if word != "$@"]


@contextlib.contextmanager
def _as_rank_0_of(world_size: int) -> Iterator[None]:
    """What torchrun would say; Megatron reads the number of processes from the environment alone."""
    before = dict(os.environ)
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _plan(own: argparse.Namespace, flags: list[str]) -> int:
    cpu_platform.install()
    # megatron-core is imported after that
    from memory_plan.plan import Target, plan
    from memory_plan.report import report

    from megatron.rl.arguments import parse_arguments

    if "--hf-model" in flags:  # the plan does not look into prompts, which need not be there yet
        prompts = str(assets.bundled_train_prompts())
        flags += ["--train-prompts", prompts, "--eval-prompts", prompts]
    with _as_rank_0_of(own.world_size):
        parsed = parse_arguments(flags)
    target = Target(own.device, int(own.gpu_memory * GIB))
    stages = plan(parsed, target)
    print(report(stages, parsed, target))
    return 0 if max(stage.total for stage in stages) <= target.memory else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
