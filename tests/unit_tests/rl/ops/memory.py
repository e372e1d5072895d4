"""Memory of a call on the CPU, from the allocator's own events."""

from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Held(NamedTuple):
    """Bytes beyond those that were held before the call."""

    peak: int  # at most, during the call
    after: int  # while its result is alive


def measure(call: Callable[[], object]) -> Held:
    """Runs ``call`` once; its result counts."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    held = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return Held(peak, held)
