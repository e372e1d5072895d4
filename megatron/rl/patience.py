"""Ranks that wait for each other outside of training, for as long as it takes.

A collective of training that takes ten minutes (``--distributed-timeout-minutes``) is a rank that is gone, and the run
ends. Before training one rank can be slow for a good reason: a file system, answers to check. These waits have a
process group of their own, whose deadline is a day; a rank that dies still ends them at once.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.rl.errors import UserError

_LIMIT = timedelta(days=1)


def meet(rank: int, world_size: int) -> dist.Store | None:
    """Where all ranks have arrived, before torch.distributed is initialised; None where nobody is to be met.

    The place is that of the environment's variables (``MASTER_ADDR``, torchrun's store), for
    ``init_process_group(store=...)``, which by itself would give late ranks no longer than a collective of training.
    """
    if world_size == 1 or dist.is_initialized():
        return None
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=_LIMIT))
    if store.add("arrived", 1) == world_size:
        store.set("all arrived", b"")
    store.wait(["all arrived"], _LIMIT)
    return store


def patient_group() -> ProcessGroup:
    """All ranks, over gloo whatever trains. Collective; torch.distributed must be initialised."""
    return dist.new_group(backend="gloo", timeout=_LIMIT)


def on_all_ranks[T](work: Callable[[], T], group: ProcessGroup) -> list[T]:
    """Runs ``work`` on every rank; every rank gets all results, by rank, once the last one is done. Collective.

    A :class:`~megatron.rl.errors.UserError` of any rank is raised on all, so that rank 0 can tell it; every other
    exception is that rank's own. Results travel pickled.
    """
    mine: tuple[T | None, UserError | None]
    try:
        mine = work(), None
    except UserError as error:
        mine = None, type(error)(*error.args)  # without its traceback, which holds what cannot be pickled
    outcomes: list[tuple[T, UserError | None]] = [mine] * group.size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, mine, group=group)
    for _, mistake in outcomes:
        if mistake is not None:
            raise mistake
    return [result for result, _ in outcomes]
