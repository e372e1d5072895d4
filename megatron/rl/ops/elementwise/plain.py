"""The two passes in plain PyTorch, on any device: a few rows at a time, so that a block stays in a cache."""

import torch

# Float32 elements of the working buffers: 1 MiB fits a core's second-level cache; a GPU wants few large launches.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}


def _row_blocks(logits: torch.Tensor) -> list[slice]:
    rows, columns = logits.shape
    step = max(1, _BLOCK_ELEMENTS[logits.device.type] // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _widened(logits: torch.Tensor, inverse_temperature: torch.Tensor | None, block: slice) -> torch.Tensor:
    """A block's logits over their temperature, in new float32 memory."""
    # Widening first makes everything after it work in place on one type, twice as fast as mixed types on a CPU.
    wide = torch.empty(logits[block].shape, device=logits.device).copy_(logits[block])
    return wide if inverse_temperature is None else wide.mul_(inverse_temperature[block].unsqueeze(1))


def statistics(
    logits: torch.Tensor, inverse_temperature: torch.Tensor | None, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :mod:`megatron.rl.ops.elementwise`."""
    rows = logits.shape[0]
    peak, sum_exp = (torch.empty(rows, device=logits.device) for _ in range(2))
    weighted = torch.empty_like(peak) if with_entropy else None
    for block in _row_blocks(logits):
        shifted = _widened(logits, inverse_temperature, block)
        torch.amax(shifted, dim=1, out=peak[block])
        shifted.sub_(peak[block].unsqueeze(1))
        exponentials = shifted.exp_() if weighted is None else torch.exp(shifted)
        torch.sum(exponentials, dim=1, out=sum_exp[block])
        if weighted is not None:
            torch.sum(shifted.mul_(exponentials), dim=1, out=weighted[block])
    return peak, sum_exp, weighted


def gradients_(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor | None,
    peak: torch.Tensor,
    constant: torch.Tensor,
    factor: torch.Tensor | None,
) -> None:
    """See :mod:`megatron.rl.ops.elementwise`."""
    for block in _row_blocks(logits):
        shifted = _widened(logits, inverse_temperature, block).sub_(peak[block].unsqueeze(1))
        if factor is None:
            logits[block] = shifted.exp_().mul_(constant[block].unsqueeze(1))
        else:
            exponentials = shifted.exp()
            shifted.mul_(factor[block].unsqueeze(1)).add_(constant[block].unsqueeze(1))
            logits[block] = shifted.mul_(exponentials)
