"""Rewards that do what the response says. The workers of the tests import this file; it must stay light."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def obey(request: dict[str, Any]) -> float:
    """The response is a command and its argument: ``value 3``, ``sleep 60``, ``die-once FILE``, ..."""
    command, _, argument = request["response"].partition(" ")
    return float(_COMMANDS[command](argument))


def sizes(request: dict[str, Any]) -> float:
    """Characters of everything that arrived."""
    return len(request["response"]) + 1e-3 * len(request["answer"]) + 1e-6 * len(request["metadata"])


def is_clean(_: dict[str, Any]) -> float:
    """1 in the main thread of a process that has imported neither torch nor Megatron's core."""
    heavy = {"torch", "megatron.core", "megatron.training"} & sys.modules.keys()
    return float(not heavy and threading.current_thread() is threading.main_thread())


def _die(argument: str) -> float:
    os._exit(int(argument or 3))


def _die_once(path: str) -> float:
    if Path(path).exists():
        return 1.0
    Path(path).touch()
    os._exit(3)


def _hang_in_c(_: str) -> float:
    """Backtracks for ages inside one C call that never lets go of the interpreter lock."""
    return float(bool(re.match("(a+)+$", "a" * 64 + "b")))


def _hang_in_python(_: str) -> float:
    while True:
        pass


def _raise(argument: str) -> float:
    raise ValueError(argument)


def _print(argument: str) -> float:
    os.write(1, b"\x00\x00\x00\x02{}")
    print(argument, flush=True)
    return 1.0


def _sleep(argument: str) -> float:
    time.sleep(float(argument))
    return 1.0


_COMMANDS: dict[str, Callable[[str], float]] = {
    "value": float,
    "sleep": _sleep,
    "hang-in-c": _hang_in_c,
    "hang-in-python": _hang_in_python,
    "die": _die,
    "die-once": _die_once,
    "raise": _raise,
    "print": _print,
    "allocate": lambda argument: len(bytearray(int(argument) << 30)),
}
