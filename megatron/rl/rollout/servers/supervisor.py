"""Runs one server and sees to its end: ``python supervisor.py TRAINER_PID GRACE_SECONDS COMMAND...``.

A small process between trainer and server. When the trainer ends in whatever way, ``kill -9`` included, or asks with
SIGTERM, it ends the server and every process that the server started, those in process groups of their own too. Its
exit status is the server's. Standard library only: it is run as a file, not imported.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <sys/prctl.h>
_POLL_S = 0.2


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _die_with_supervisor() -> None:
    """In the server, before it is executed. Were the supervisor killed, the server would have nobody left."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _descendants() -> list[int]:
    """Process ids of all that descend from this process: as a subreaper it inherits its descendants' orphans."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, parent = file.read().rpartition(")")[2].split()[:2]
            except OSError:  # it ended meanwhile
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry))
    found, open_ends = [], [os.getpid()]
    while open_ends:
        for child in children.get(open_ends.pop(), []):
            found.append(child)
            open_ends.append(child)
    return found


def _signal_all(processes: list[int], number: int) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """Asks the server to end, and after ``grace_s`` ends whatever is left of it."""
    if server.poll() is None:
        server.terminate()
        deadline = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
    while remaining := _descendants():
        _signal_all(remaining, signal.SIGKILL)
        time.sleep(_POLL_S / 4)
    server.wait()


def main(trainer: int, grace_s: float, command: list[str]) -> int:
    """Returns the server's exit status, negative where a signal ended it."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, frame: asked.append(received))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_supervisor)
    # The parent's id changes when the trainer has ended, whichever of its threads started this process.
    while server.poll() is None and not asked and os.getppid() == trainer:
        time.sleep(_POLL_S)
    _end(server, grace_s)
    return server.returncode


if __name__ == "__main__":
    status = main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
    sys.exit(status if status >= 0 else 128 - status)
