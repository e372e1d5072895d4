"""Whether a run ends before its last step, as Megatron's exit flags ask for."""

import argparse
import time
from collections.abc import Callable

import torch


class Stop:
    """Says after a step why the run should end there. Every rank has one, and all come to the same answer."""

    def __init__(self, args: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> None:
        """Time counts from now on. ``args``: Megatron's, with its signal handler set where they ask for one."""
        self._args = args
        self._clock = clock
        self._began = clock()

    def __call__(self, iteration: int) -> str | None:
        """The reason in words, None to go on. ``iteration``: optimizer steps finished. Collective."""
        args = self._args
        if args.exit_signal_handler and any(_signals_received()):
            return f"{args.exit_signal.name} was received (--exit-signal-handler)"
        if args.exit_duration_in_mins is not None and self._is_time_up(60 * args.exit_duration_in_mins):
            return f"{args.exit_duration_in_mins} minutes are up (--exit-duration-in-mins)"
        if args.exit_interval is not None and iteration % args.exit_interval == 0:
            return f"{iteration} optimizer steps are done (--exit-interval {args.exit_interval})"
        return None

    def _is_time_up(self, seconds: float) -> bool:
        """By rank 0's clock, so that all ranks end after the same step."""
        box = [self._clock() - self._began >= seconds]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]


def _signals_received() -> list[int]:
    from megatron.training.global_vars import get_signal_handler

    return get_signal_handler().signals_received()
