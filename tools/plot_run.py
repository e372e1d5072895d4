"""Draws the curves of a run, and figures 1 and 2 of arXiv 2606.09821, from its run folder."""

import argparse
import sys
from collections.abc import Sequence

from megatron.rl.errors import UserError
from megatron.rl.plots import plot_run


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 2 for a user's mistake, told in one line."""
    parser = argparse.ArgumentParser(prog="plot_run.py", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run, with metrics.jsonl in it")
    parser.add_argument("--out", metavar="DIR", help="folder for the PNG files (default: RUN_DIR/plots)")
    args = parser.parse_args(argv)
    try:
        report = plot_run(args.run_dir, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for reason in report.left_out:
        print(reason)
    for path in report.written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
