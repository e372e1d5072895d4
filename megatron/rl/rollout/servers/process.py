"""One server as a child of the trainer: started, waited for until it is healthy, ended with all that it started."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx2

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.servers.specs import ServerSettings, ServerSpec

_HOST = "127.0.0.1"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_POLL_S = 0.25
_TAIL_LINES, _TAIL_CHARACTERS = 8, 1500
# What torchrun tells its ranks: a server is none of them.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC")


class ServerProcess:
    """A server on loopback. It ends with :meth:`stop`, and by itself when this process ends, killed or not.

    Args:
        name: what messages call it.
        command: its command line.
        environment: variables added to those of this process.
        port: where it will answer.
        health_path: answers 200 when it serves.
        log_path: takes its output; an older file is replaced.
        grace_s: seconds between asking it to end and killing it.

    Raises:
        RolloutError: the command's program does not exist, or the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        port: int,
        health_path: str,
        log_path: Path,
        grace_s: float = 5.0,
    ) -> None:
        self.url = f"http://{_HOST}:{port}"
        self._name = name
        self._health_url = self.url + health_path
        self._log_path = log_path
        self._grace_s = grace_s
        if not os.access(command[0], os.X_OK):
            raise RolloutError(f"the {name} server's Python {command[0]} is missing; `make env-{name}` installs it")
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log = log_path.open("wb")
        except OSError as error:
            raise RolloutError(f"the {name} server's log {log_path} cannot be written ({error})") from None
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_SUPERVISOR), str(os.getpid()), str(grace_s), *command],
                env={**_inherited(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is the trainer's to handle
            )

    def wait_until_healthy(self, deadline_s: float) -> None:
        """Returns when the server answers.

        Raises:
            RolloutError: it ended, or did not answer within ``deadline_s`` seconds; with the end of its log.
        """
        deadline = time.monotonic() + deadline_s
        with httpx2.Client(timeout=5.0, trust_env=False) as client:
            while True:
                if death := self.describe_death():
                    raise RolloutError(death)
                try:
                    if client.get(self._health_url).status_code == httpx2.codes.OK:
                        return
                except httpx2.TransportError:
                    pass  # not listening yet
                if time.monotonic() > deadline:
                    self.stop()
                    raise RolloutError(
                        f"the {self._name} server did not answer at {self._health_url} within {deadline_s:.0f} s; "
                        f"{self._tail()}"
                    )
                time.sleep(_POLL_S)

    def describe_death(self) -> str | None:
        """None while the server runs; else one line with its exit status and the end of its log."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"status {status}" if status < 128 else f"signal {signal.Signals(status - 128).name}"
        return f"the {self._name} server at {self.url} ended with {how}; {self._tail()}"

    def stop(self) -> None:
        """Ends the server and all that it started; returns when they are gone."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(self._grace_s + 10.0)
        except subprocess.TimeoutExpired:
            # A supervisor that cannot end its server has a process in an uninterruptible wait; nothing helps there.
            raise RolloutError(f"the {self._name} server at {self.url} cannot be ended; {self._tail()}") from None

    def _tail(self) -> str:
        lines = [" ".join(line.split()) for line in self._log_path.read_text(errors="replace").splitlines()]
        tail = " | ".join([line for line in lines if line][-_TAIL_LINES:])
        return f"its log {self._log_path} ends: {tail[-_TAIL_CHARACTERS:] or '(empty)'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


def start_servers(
    spec: ServerSpec, settings: ServerSettings, *, count: int, log_dir: Path, deadline_s: float = 600.0
) -> list[ServerProcess]:
    """Starts ``count`` servers on free ports of this machine and waits until all are healthy. All or none.

    Args:
        deadline_s: seconds for each to become healthy.

    Raises:
        RolloutError: one of them ended or did not answer in time.
    """
    servers: list[ServerProcess] = []
    try:
        for index in range(count):
            port = free_port()
            servers.append(
                ServerProcess(
                    spec.name,
                    spec.command(settings, port),
                    environment=spec.environment(settings),
                    port=port,
                    health_path=spec.health_path,
                    log_path=log_dir / f"{spec.name}-{index}.log",
                )
            )
        for server in servers:
            server.wait_until_healthy(deadline_s)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}


def free_port() -> int:
    """A port of loopback on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
