"""Write problems of a reasoning-gym data set as a prompt file for ``--reward reasoning-gym``.

Usage: python tools/make_reasoning_gym_prompts.py --dataset basic_arithmetic --count 1000 --out train.jsonl
"""

import argparse
import sys
from pathlib import Path

from megatron.rl.errors import UserError
from megatron.rl.rewards.reasoning_gym_prompts import make_records, write_prompt_file


def main(argv: list[str]) -> int:
    """Parse the command line and write the file. Returns 0, or 2 for a mistake, told in one line."""
    parser = argparse.ArgumentParser(description="Write problems of a reasoning-gym data set as a prompt file.")
    parser.add_argument("--dataset", required=True, help="for example basic_arithmetic")
    parser.add_argument("--count", type=int, default=1000, help="problems to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="use another one for held-out problems (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args(argv)
    try:
        records = make_records(args.dataset, args.count, args.seed)
        write_prompt_file(args.out, records)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(records)} problems of {args.dataset} to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
