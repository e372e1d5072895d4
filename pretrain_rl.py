"""Reinforcement-learning training of a Megatron policy: ``torchrun pretrain_rl.py --loss drpo --fp8-format e4m3``."""

import json
import os
import sys
import time


def main(argv: list[str]) -> int:
    """Parses, builds, trains. Returns the exit status: 0, or 2 for a user's mistake, told in one line."""
    from megatron.rl.quiet import quiet_libraries

    quiet_libraries()
    from megatron.rl import cpu_platform
    from megatron.rl.errors import UserError

    cpu_platform.install()
    try:
        from megatron.rl.runner import run

        run(argv)
    except UserError as error:
        _report(str(error))
        return 2
    return 0


def _report(message: str) -> None:
    """One line on standard error from rank 0, and the same where torchrun looks for a failed rank's reason."""
    line = " ".join(message.split())
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {line}", file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with open(path, "w") as file:
            json.dump({"message": {"message": line, "extraInfo": {"timestamp": int(time.time())}}}, file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
