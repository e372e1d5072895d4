"""Write problems of a reasoning-gym data set as a prompt file for ``--reward reasoning-gym``.

Usage: python tools/make_reasoning_gym_prompts.py --dataset basic_arithmetic --count 1000 --out train.jsonl
"""

import argparse
import json
import sys
from pathlib import Path

from megatron.rl.errors import ConfigError, UserError
from megatron.rl.rewards.reasoning_gym_prompts import make_records, without_prompts_of, write_prompt_file


def main(argv: list[str]) -> int:
    """Parse the command line and write the file. Returns 0, or 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description="Write problems of a reasoning-gym data set as a prompt file.")
    parser.add_argument("--dataset", required=True, help="for example basic_arithmetic")
    parser.add_argument("--count", type=int, default=1000, help="problems to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="use another one for held-out problems (default: 0)")
    parser.add_argument(
        "--config", default="{}", help="the data set's settings as JSON, for example '{\"max_terms\": 2}'"
    )
    parser.add_argument("--exclude", type=Path, help="leave out the problems of this prompt file, held-out ones say")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args(argv)
    try:
        records = make_records(args.dataset, args.count, args.seed, _settings(args.config))
        if args.exclude is not None:
            records = without_prompts_of(args.exclude, records)
        write_prompt_file(args.out, records)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(records)} problems of {args.dataset} to {args.out}")
    return 0


def _settings(text: str) -> dict:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--config must be a JSON object (got {text})")
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
