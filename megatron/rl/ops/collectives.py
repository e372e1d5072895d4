"""Collectives of the loss path, of which no thread has anything left to do once the program ends.

One of gloo's own threads works on a collective, and lets its tensors go a moment after :meth:`Work.wait` has returned.
Where Python knows such a tensor, that takes the interpreter's lock. Before Python 3.14 a thread that asks for the lock
while the interpreter ends is unwound on the spot, and since C++ lets tensors go in functions that must not throw, the
whole process then dies: SIGABRT, "terminate called without an active exception". Ending the process group joins its
threads, but only where nobody else holds the group, and a caller's ``tp_group`` is a variable that lives as long as
the program. A sum whose parts are temporary, as that of d_hidden, is also the last thing that a call of the loss does.

So what was handed to a collective is remembered until it is gone, and the interpreter's end waits for that.
"""

import atexit
import time

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdRef

_PATIENCE = 30.0  # seconds; in vain only where the frames of an uncaught error hold a tensor as well
_held: set[WeakIdRef] = set()


def finish(work: dist.Work, *tensors: torch.Tensor) -> None:
    """Waits for a collective. ``tensors``, the temporary ones among what it was given, are seen to at exit."""
    work.wait()
    _held.update(WeakIdRef(tensor, _held.discard) for tensor in tensors if tensor.device.type == "cpu")


def all_gather(everyone: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Every rank's ``mine`` [n, ...] into ``everyone`` [ranks, n, ...]. Both are temporary."""
    flat = everyone.flatten(0, 1)
    finish(dist.all_gather_into_tensor(flat, mine, group=group, async_op=True), mine, everyone, flat)


@atexit.register
def _await_release() -> None:
    deadline = time.monotonic() + _PATIENCE
    while _held and time.monotonic() < deadline:
        time.sleep(0.001)  # in which other threads get the lock
