"""Why a run ends early, and that all ranks agree on it."""

import argparse
import os
import signal
from typing import Any

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl.stopping import Stop  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402


def _args(**flags: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"exit_interval": None, "exit_duration_in_mins": None, "exit_signal_handler": False} | flags
    )


@pytest.mark.parametrize(("iteration", "stops"), [(2, False), (4, True), (6, False), (8, True)])
def test_an_interval_ends_a_run_at_its_multiples(iteration, stops):
    reason = Stop(_args(exit_interval=4))(iteration)
    assert reason == (f"{iteration} optimizer steps are done (--exit-interval 4)" if stops else None)


def test_nothing_ends_a_run_that_nobody_asked_to_end():
    assert Stop(_args())(4) is None


def _two_ranks(rank: int, world_size: int) -> tuple[list[str | None], list[str | None]]:
    # Rank 1's clock runs an hour fast, and only rank 1 gets the signal.
    times = iter([0.0, 59.0, 61.0])
    stop = Stop(_args(exit_duration_in_mins=1), clock=lambda: next(times) + 3600 * rank)
    timed = [stop(2), stop(4)]
    flags = ("--exit-signal-handler", "--exit-signal", "SIGUSR1")
    with started.started(flags) as here:
        stop = Stop(here.parsed.megatron)
        signalled = [stop(2)]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        signalled.append(stop(4))
    return timed, signalled


def test_all_ranks_end_after_the_same_step():
    for timed, signalled in run_ranks(2, _two_ranks):
        assert timed == [None, "1 minutes are up (--exit-duration-in-mins)"]
        assert signalled == [None, "SIGUSR1 was received (--exit-signal-handler)"]
