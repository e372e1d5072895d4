"""Whole sequences for objectives that need them, where ranks hold parts of each (context parallelism)."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.rl.ops.collectives import all_gather


def solve_together(
    objective: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    per_token: tuple[torch.Tensor, ...],
    sequence_ids: torch.Tensor,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``objective(*per_token, sequence_ids)`` on the tokens of all ranks; what it gives for this rank's, [n] twice.

    Five numbers a token travel, so every rank can afford to solve for all. ``per_token`` are [n] float32, ``n`` may
    differ between ranks and be 0. Collective over ``group``.
    """
    # float64 holds float32 numbers and integers up to 2^53 exactly, so one collective carries both.
    mine = torch.stack([*(x.double() for x in per_token), sequence_ids.double()], dim=1)
    count = torch.tensor([mine.shape[0]], device=mine.device)
    counts = count.new_empty(group.size(), 1)
    all_gather(counts, count, group)
    sizes = counts.flatten().tolist()
    padded = mine.new_zeros(max(sizes), mine.shape[1])
    padded[: mine.shape[0]] = mine
    received = mine.new_empty(len(sizes), *padded.shape)
    all_gather(received, padded, group)
    everything = torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])
    columns = [column.to(per_token[0].dtype) for column in everything[:, :-1].unbind(1)]
    value, slope = objective(*columns, everything[:, -1].to(sequence_ids.dtype))
    start = sum(sizes[: group.rank()])
    own = slice(start, start + mine.shape[0])
    return value[own], slope[own]
