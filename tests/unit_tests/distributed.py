"""One helper that runs a function on several gloo ranks and brings results and errors back."""

import contextlib
import os
import pickle
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by a server from which all ranks are forked: at 7 s each, imports would be most of the tests' time.
_PRELOADED = ["tests.unit_tests.rl.started", "megatron.rl.runner", "megatron.training.checkpointing"]


class RankFailure(AssertionError):
    """A rank failed; the message is that rank's own traceback."""


def free_port() -> int:
    """A TCP port that the system says is free on loopback."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _entry(rank: int, world_size: int, port: int, fn: Callable, args: tuple, results: Any) -> None:
    os.setsid()  # what it starts, such as Megatron's helper that writes checkpoints, can be ended with it
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        value = fn(rank, world_size, *args)
        dist.barrier()
        # By value: a tensor in shared memory may be gone with its rank before it is fetched.
        results.put((rank, None, pickle.dumps(value)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()  # told before the group is gone, at which the other ranks fail too
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 120) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on ``world_size`` gloo processes; returns their values by rank.

    ``fn`` is module-level and its values can be pickled. Raises :class:`RankFailure` with the first failing
    rank's traceback, or with the ranks still silent after ``timeout`` seconds. Leaves no process behind.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    results = context.Queue()
    port = free_port()
    processes = [
        # not daemons, which may not start processes of their own
        context.Process(target=_entry, args=(rank, world_size, port, fn, args, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(values) < world_size:
            try:
                rank, error, value = results.get(timeout=0.5)
            except queue.Empty:
                # What a rank says is on its way before it ends, and nothing has been for half a second.
                _refuse_silent_ends(processes, values.keys())
                if time.monotonic() > deadline:
                    silent = [rank for rank in range(world_size) if rank not in values]
                    raise RankFailure(f"ranks {silent} gave nothing within {timeout} s") from None
                continue
            if error is not None:
                # A rank that was killed says nothing; the others then say that they lost their connection to it.
                _refuse_silent_ends(processes, {rank, *values, *_said_within(results, 1.0)})
                raise RankFailure(f"rank {rank} of {world_size} failed:\n{error}")
            values[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(timeout=2 if len(values) == world_size else 0)
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has ended, with all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
    return [values[rank] for rank in range(world_size)]


def _said_within(results: Any, seconds: float) -> set[int]:
    """The ranks that report anything in this time."""
    said: set[int] = set()
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            said.add(results.get(timeout=left)[0])
    return said


def _refuse_silent_ends(processes: list, said: Collection[int]) -> None:
    for rank, process in enumerate(processes):
        if rank not in said and process.exitcode is not None:
            how = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "ended without a word"
            raise RankFailure(f"rank {rank} {how} (exit code {process.exitcode})")
