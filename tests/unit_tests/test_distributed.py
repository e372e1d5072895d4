"""The helper of all multi-process tests: errors are the failing rank's own, soon, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.distributed import RankFailure, run_ranks

SOON = 60  # seconds; far below the time limits given


def total(rank: int, ranks: int, offset: int) -> float:
    x = torch.tensor(float(rank + offset))
    dist.all_reduce(x)
    return x.item()


def test_values_come_back_by_rank():
    assert run_ranks(3, total, 10) == [33.0, 33.0, 33.0]


def leave_a_trace(folder: str) -> None:
    """The rank's process and one that it starts, which does not end by itself."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    for pid in (os.getpid(), child.pid):
        open(os.path.join(folder, str(pid)), "w").close()


def fail_in(rank: int, ranks: int, folder: str, how: str) -> None:
    """Rank 1 fails as asked; the others wait for it in a collective that it never joins."""
    leave_a_trace(folder)
    dist.barrier()
    if rank != 1:
        dist.all_reduce(torch.ones(1))
        return
    if how == "raises":
        raise ValueError("one of ours")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leaves":
        os._exit(1)
    if how == "hangs":
        time.sleep(600)


@pytest.mark.parametrize(
    ("how", "message", "timeout"),
    [
        ("raises", r"rank 1 of 3 failed:[\s\S]*ValueError: one of ours", 300),
        ("is killed", "rank 1 was killed by signal 9", 300),
        ("leaves", "rank 1 ended without a word", 300),
        ("hangs", r"ranks \[0, 1, 2\] gave nothing within 5 s", 5),
    ],
)
def test_a_failing_rank_is_named_soon_and_no_process_is_left(tmp_path, how, message, timeout):
    started = time.monotonic()
    with pytest.raises(RankFailure, match=message):
        run_ranks(3, fail_in, str(tmp_path), how, timeout=timeout)
    assert time.monotonic() - started < SOON
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 6
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=10)  # killed, a process takes a moment to be gone
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
