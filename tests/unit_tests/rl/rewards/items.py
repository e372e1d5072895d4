"""Items to score, and whether a process still runs."""

import time
from pathlib import Path

from megatron.rl.types import Prompt, RewardItem


def item(response: str, answer: str = "1", source: str = "", metadata: dict | None = None) -> RewardItem:
    return RewardItem(response, Prompt(0, "", (1,), answer, source, metadata or {}))


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(pids: list[int], limit_s: float = 30) -> list[int]:
    """Waits for the processes to end; those that still run after the limit."""
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
