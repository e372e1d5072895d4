"""The program of one scoring process: ``python -m megatron.rl.rewards.worker MODULE:FUNCTION SECONDS``.

It reads requests from standard input and writes replies to standard output, one at a time, and ends with
its standard input, so no worker outlives its parent. FUNCTION takes a request and returns the score. It runs
in the main thread of a process of its own (math-verify scores 0 elsewhere, verl #3407), and imports neither
torch nor Megatron.
"""

import importlib
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from megatron.rl.rewards.protocol import STARTUP_S, FrameBuffer, UnreadableResponse, encode

_GRACE_S = 1.0  # the parent ends a late worker at the deadline; the kernel does it this much later
_MEMORY_BYTES = 4 << 30
_DETAIL_CHARACTERS = 500

Score = Callable[[dict[str, Any]], float]


def main(argv: list[str]) -> int:
    """Answers requests until standard input ends."""
    spec, timeout_s = argv[0], float(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes our input
    replies = os.dup(1)
    os.dup2(2, 1)  # whatever a reward prints must not end up between the replies
    _limit_memory()
    try:
        _end_after(STARTUP_S)
        ready, score = _load(spec)
        _send(replies, ready)
        if score is not None:
            _serve(score, replies, timeout_s)
    except BrokenPipeError:
        pass  # the parent is gone
    return 0


def _limit_memory() -> None:
    """Makes 10**(10**10) a MemoryError here instead of the end of the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _serve(score: Score, replies: int, timeout_s: float) -> None:
    requests = FrameBuffer()
    while True:
        _end_after(0)
        while (request := requests.pop()) is None:
            data = os.read(0, 1 << 16)
            if not data:
                return
            requests.feed(data)
        _end_after(timeout_s + _GRACE_S)
        _send(replies, _reply(score, request))


def _end_after(seconds: float) -> None:
    """Has the kernel end this process after ``seconds``, even inside a C call or without a parent; 0: never."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _load(spec: str) -> tuple[dict[str, Any], Score | None]:
    """The first message to the parent, and the function named by ``spec``, or None where it cannot be had."""
    module, _, name = spec.partition(":")
    try:
        return {"ready": True}, getattr(importlib.import_module(module), name)
    except Exception as error:
        return {"ready": False, "detail": _describe(error)}, None


def _reply(score: Score, request: dict[str, Any]) -> dict[str, Any]:
    try:
        value = float(score(request))
    except UnreadableResponse as error:
        return {"score": 0.0, "status": "unreadable", "detail": str(error)[:_DETAIL_CHARACTERS]}
    except Exception as error:
        return {"score": 0.0, "status": "error", "detail": _describe(error)}
    if not math.isfinite(value):
        return {"score": 0.0, "status": "error", "detail": f"the score is {value}"}
    return {"score": value, "status": "ok", "detail": ""}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_DETAIL_CHARACTERS]


def _send(replies: int, message: dict[str, Any]) -> None:
    data = encode(message)
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
