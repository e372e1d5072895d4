"""Writes docs/flags.md from the tables of flags."""

import sys
from pathlib import Path

from megatron.rl.flags import flags_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def main() -> int:
    """Returns the exit status."""
    PAGE.write_text(flags_page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
