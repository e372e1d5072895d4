"""The two passes as Triton kernels, for GPUs: each reads the logits from memory once and keeps nothing beside them.

Two things go beyond the other forms. Logits of -inf count as exp(x) = 0 and x exp(x) = 0. A row of nothing else has
sums of 0 and float32's lowest number as its peak, as a rank without columns has. NaN makes a row's sums NaN.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

# Chosen for an H100 and not autotuned, so that a run repeats bit by bit. 4096 columns over 8 warps are 16 a thread: in
# bfloat16 two loads of 16 bytes, and with two partial sums for each column still at most 80 registers, so that three
# programs or more share a multiprocessor and one's loads cover another's reductions. A usual vocabulary is some 30
# blocks. No fused multiply-adds: they would leave the peak's own product unrounded, and put x off 0 there.
_BLOCK = tl.constexpr(4096)
_LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}

_INFINITY = tl.constexpr(float("inf"))
# A finite start needs no case for the first block, where -inf - -inf would be NaN.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# Any rise of the peak by more counts as this much: exp of it is 0 already, and its product with a sum stays finite.
_FARTHEST = tl.constexpr(-1000.0)


def statistics(
    logits: torch.Tensor, inverse_temperature: torch.Tensor | None, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :mod:`megatron.rl.ops.elementwise`."""
    rows, columns = logits.shape
    peak = torch.empty(rows, device=logits.device)
    sum_exp = torch.empty_like(peak)
    weighted = torch.empty_like(peak) if with_entropy else None
    with _on_device_of(logits):
        _statistics[(rows,)](logits, inverse_temperature, peak, sum_exp, weighted, columns, **_LAUNCH)
    return peak, sum_exp, weighted


def gradients_(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor | None,
    peak: torch.Tensor,
    constant: torch.Tensor,
    factor: torch.Tensor | None,
) -> None:
    """See :mod:`megatron.rl.ops.elementwise`."""
    rows, columns = logits.shape
    # In one dimension, since the others of a grid end at 65,535.
    grid = (rows * triton.cdiv(columns, _BLOCK.value),)
    with _on_device_of(logits):
        _gradients_[grid](logits, inverse_temperature, peak, constant, factor, columns, **_LAUNCH)


def _on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def _statistics(logits, inverse_temperature, peaks, sums, weighted_sums, columns):
    row = tl.program_id(0)
    lanes = tl.arange(0, _BLOCK)
    row_logits = logits + row.to(tl.int64) * columns
    peak = tl.full((), _LOWEST, tl.float32)
    # A sum for each lane, over the blocks, adds few numbers one after the other; the rest are added as a tree.
    total = tl.zeros((_BLOCK,), tl.float32)
    weighted = tl.zeros((_BLOCK,), tl.float32)
    # Two stages: the next block is on its way while this one is reduced.
    for first in tl.range(0, columns, _BLOCK, num_stages=2):
        inside = first + lanes < columns
        scaled = tl.load(row_logits + first + lanes, mask=inside, other=0.0).to(tl.float32)
        if inverse_temperature is not None:
            scaled *= tl.load(inverse_temperature + row)
        scaled = tl.where(inside, scaled, -_INFINITY)
        risen = tl.maximum(peak, tl.max(scaled, 0))
        move = tl.maximum(peak - risen, _FARTHEST)
        kept = tl.exp(move)
        shifted = scaled - risen
        exponentials = tl.exp(shifted)
        if weighted_sums is not None:
            # With x' = x + move, the sum of x' exp(x') is exp(move) times (that of x exp(x), plus move that of exp(x)).
            products = tl.where(shifted == -_INFINITY, 0.0, shifted * exponentials)
            weighted = (weighted + move * total) * kept + products
        total = total * kept + exponentials
        peak = risen
    tl.store(peaks + row, peak)
    tl.store(sums + row, tl.sum(total, 0))
    if weighted_sums is not None:
        tl.store(weighted_sums + row, tl.sum(weighted, 0))


@triton.jit
def _gradients_(logits, inverse_temperature, peaks, constants, factors, columns):
    blocks = tl.cdiv(columns, _BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * _BLOCK + tl.arange(0, _BLOCK)
    inside = column < columns
    places = logits + row.to(tl.int64) * columns + column
    scaled = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    if inverse_temperature is not None:
        scaled *= tl.load(inverse_temperature + row)
    shifted = scaled - tl.load(peaks + row)
    exponentials = tl.exp(shifted)
    if factors is None:
        gradients = exponentials * tl.load(constants + row)
    else:
        slopes = shifted * tl.load(factors + row) + tl.load(constants + row)
        gradients = tl.where(shifted == -_INFINITY, 0.0, slopes * exponentials)
    tl.store(places, gradients.to(logits.dtype.element_ty), mask=inside)
