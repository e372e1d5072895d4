"""Servers end with the trainer, whichever way it ends, and take all with them that they started."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.servers.process import ServerProcess, free_port, start_servers
from megatron.rl.rollout.servers.specs import ServerSettings, ServerSpec

# A server with a child of its own and one in another session, which write their process ids to a file. Told to, it
# ignores the request to end.
SERVER = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys
    port, file, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("starting", os.environ.get("RANK"), os.environ.get("EXTRA"), flush=True)
    if mode == "fails":
        print("first line\\n\\nValueError: no such model", flush=True)
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    sleep = [sys.executable, "-c", code]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    open(file, "w").write(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
    if mode == "mute":
        signal.pause()
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


def command(port: int, file: Path, mode: str = "good") -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), str(file), mode]


def start(tmp_path: Path, mode: str = "good", **changes) -> ServerProcess:
    port = free_port()
    options = {"environment": {"EXTRA": "7"}, "port": port, "health_path": "/health", "grace_s": 1.0, **changes}
    return ServerProcess("toy", command(port, tmp_path / "pids", mode), log_path=tmp_path / "logs/toy.log", **options)


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[int], deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while alive := [pid for pid in processes if is_running(pid)]:
        assert time.monotonic() < end, f"still running: {alive}"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["good", "stubborn"])
def test_stop_ends_the_server_and_all_that_it_started(tmp_path, mode):
    server = start(tmp_path, mode)
    server.wait_until_healthy(60)
    processes = pids(tmp_path)
    assert all(map(is_running, processes))
    assert server.describe_death() is None
    server.stop()
    assert not any(map(is_running, processes))
    server.stop()  # again is no error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_is_killed_leaves_nothing_behind(tmp_path, number):
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import sys, time; sys.path.insert(0, {str(Path.cwd())!r})\n"
            "from pathlib import Path\n"
            "from tests.unit_tests.rl.rollout.servers.test_process import start\n"
            f"start(Path({str(tmp_path)!r})).wait_until_healthy(60); print('up', flush=True); time.sleep(300)",
        ],
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"up\n"
    processes = pids(tmp_path)
    supervisor = psutil.Process(processes[0]).ppid()
    trainer.send_signal(number)
    trainer.wait(60)
    trainer.stdout.close()
    wait_until_gone([*processes, supervisor])


def test_a_killed_supervisor_takes_the_server_along(tmp_path):
    server = start(tmp_path)
    server.wait_until_healthy(60)
    main, *others = pids(tmp_path)
    os.kill(psutil.Process(main).ppid(), signal.SIGKILL)
    wait_until_gone([main])
    assert "ended with" in (server.describe_death() or "")
    for other in others:  # nobody is left who knows of them
        os.kill(other, signal.SIGKILL)


def test_a_server_that_fails_to_start_shows_its_log_in_one_line(tmp_path):
    with pytest.raises(RolloutError, match="the toy server .* ended with status 3; its log .*toy.log ends: ") as caught:
        start(tmp_path, "fails").wait_until_healthy(60)
    assert str(caught.value).endswith("first line | ValueError: no such model")
    assert "\n" not in str(caught.value)


def test_a_server_killed_later_tells_how(tmp_path):
    server = start(tmp_path)
    server.wait_until_healthy(60)
    processes = pids(tmp_path)
    os.kill(processes[0], signal.SIGKILL)
    wait_until_gone(processes)  # what it started ends with it
    server.stop()
    assert "ended with signal SIGKILL" in (server.describe_death() or "")


def test_a_server_that_never_answers_is_ended_at_the_deadline(tmp_path):
    server = start(tmp_path, "mute")
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
        time.sleep(0.05)
    with pytest.raises(
        RolloutError, match=r"the toy server did not answer at .*/health within 0 s; its log .* ends: st"
    ):
        server.wait_until_healthy(0.3)
    wait_until_gone(pids(tmp_path))


def test_torchruns_variables_stay_with_the_trainer_and_the_others_are_added(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with start(tmp_path) as server:
        server.wait_until_healthy(60)
    assert (tmp_path / "logs/toy.log").read_text().startswith("starting None 7")


def test_a_missing_environment_is_said_with_the_command_that_makes_it(tmp_path):
    settings = ServerSettings(tmp_path / "bin/python", tmp_path, "float32", 64, on_cpu=True)
    spec = ServerSpec("vllm", "/health", lambda settings, port: [], lambda settings: {})
    with pytest.raises(RolloutError, match="bin/python is missing; `make env-vllm` installs it"):
        start_servers(spec, settings, count=1, log_dir=tmp_path)


def test_one_server_that_fails_ends_the_others(tmp_path):
    counter = iter(range(2))

    def arguments(settings: ServerSettings, port: int) -> list[str]:
        index = next(counter)
        return command(port, tmp_path / f"pids{index}", ["good", "fails"][index])[1:]

    settings = ServerSettings(Path(sys.executable), tmp_path, "float32", 64, on_cpu=True)
    spec = ServerSpec("toy", "/health", arguments, lambda settings: {"EXTRA": "1"})
    with pytest.raises(RolloutError, match="no such model"):
        start_servers(spec, settings, count=2, log_dir=tmp_path)
    wait_until_gone([int(pid) for pid in (tmp_path / "pids0").read_text().split()])
