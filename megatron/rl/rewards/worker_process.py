"""One scoring process as its parent sees it."""

import os
import selectors
import subprocess
import sys
import time
from typing import Any

from megatron.rl.errors import RewardError
from megatron.rl.rewards.protocol import STARTUP_S, FrameBuffer, encode


class WorkerTimeout(Exception):
    """No reply by the deadline."""


class WorkerDied(Exception):
    """The process ended before it replied."""


class WorkerDiedStarting(WorkerDied):
    """The process ended before it was ready for a request."""


class WorkerProcess:
    """Starts a worker at once and talks to it; used by one thread, except for :meth:`kill`."""

    def __init__(self, spec: str, timeout_s: float) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._started = False
        self._failure = ""  # why the start failed, told again to everyone who asks
        self._frames = FrameBuffer()
        self._process = subprocess.Popen(
            # -P: the working directory's files must not stand in for the standard library's.
            [sys.executable, "-P", "-W", "ignore", "-m", "megatron.rl.rewards.worker", spec, str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to ``request``. The time starts when the worker is ready for it.

        Raises:
            WorkerTimeout: no reply in time; the worker is still busy and must be killed.
            WorkerDied: the worker ended; WorkerDiedStarting where it was not ready yet.
            RewardError: the worker says that it cannot load the reward, or is not ready in time.
        """
        self._wait_until_ready()
        return self._exchange(encode(request), self._timeout_s)

    def kill(self) -> None:
        """Ends the process at once. From any thread."""
        self._process.kill()

    def dispose(self) -> None:
        """Ends the process and frees what it holds."""
        self._process.kill()
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _wait_until_ready(self) -> None:
        if not self._started:
            self._started = True
            self._failure = self._start()
        if self._failure:
            raise RewardError(f"the scoring process of {self._spec} {self._failure}")

    def _start(self) -> str:
        """Waits for the first message; why there is no use in asking, or nothing."""
        try:
            message = self._exchange(b"", STARTUP_S)
        except WorkerTimeout:
            return f"did not start in {STARTUP_S:.0f} s"
        except WorkerDied as death:
            raise WorkerDiedStarting(*death.args) from None
        return "" if message["ready"] else f"cannot load it: {message['detail']}"

    def _exchange(self, outgoing: bytes, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if outgoing:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            while (message := self._frames.pop()) is None:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise WorkerTimeout
                try:
                    for key, _ in events:
                        if key.fileobj is self._stdout:
                            self._receive()
                            continue
                        outgoing = outgoing[os.write(key.fd, outgoing) :]
                        if not outgoing:
                            selector.unregister(self._stdin)
                except (WorkerDied, BrokenPipeError):
                    self._raise_ended(deadline)
        return message

    def _receive(self) -> None:
        data = os.read(self._stdout.fileno(), 1 << 16)
        if not data:
            raise WorkerDied
        self._frames.feed(data)

    def _raise_ended(self, deadline: float) -> None:
        # A worker past its deadline may be ended by the kernel before this thread gets to look.
        if time.monotonic() >= deadline:
            raise WorkerTimeout from None
        self._process.kill()
        raise WorkerDied(f"its exit status is {self._process.wait()}") from None


def _environment() -> dict[str, str]:
    """This process's environment and import path; a worker is one thread and has no use for a GPU."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
