"""Softmax over a vocabulary that may be split over ranks, and its gradient, for one chunk of tokens.

The two passes over the logits, :func:`local_statistics` (which reads them) and :func:`logit_gradients_` (which
overwrites them), are all the element-wise work over the vocabulary that there is. Between them lies the one
collective. Both work in float32 on a few rows at a time, so that what they need beside the logits stays in a cache.
"""

from typing import NamedTuple

import torch

from megatron.rl.ops.chunking import Rows
from megatron.rl.ops.vocab_shard import VocabShard

# Float32 elements of the working buffers: 1 MiB fits a core's second-level cache; a GPU wants few large launches.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}


class ChunkSoftmax(NamedTuple):
    """Per token of a chunk, over the whole vocabulary, float32: [n]."""

    logprobs: torch.Tensor  # log-probability of the target, nats, at most 0
    entropy: torch.Tensor | None  # nats; None where not asked for
    peak: torch.Tensor  # largest logit
    sum_exp: torch.Tensor  # sum of exp(logit - peak), at least 1

    @property
    def logsumexp(self) -> torch.Tensor:
        """log of the sum of exp(logit), nats."""
        return self.peak + self.sum_exp.log()

    def at(self, rows: Rows) -> "ChunkSoftmax":
        """The same for some of the tokens."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return ChunkSoftmax(self.logprobs[rows], entropy, self.peak[rows], self.sum_exp[rows])


class ChunkTargets(NamedTuple):
    """Where the targets of a chunk lie among this rank's columns."""

    column: torch.Tensor  # [n] int64, 0 where the target is another rank's
    here: torch.Tensor  # [n] bool

    @classmethod
    def of(cls, target_ids: torch.Tensor, shard: VocabShard) -> "ChunkTargets":
        """The targets' columns on ``shard``."""
        column = target_ids - shard.start
        here = (column >= 0) & (column < shard.rows)
        return cls(torch.where(here, column, 0), here)


def _row_blocks(logits: torch.Tensor) -> list[slice]:
    rows, columns = logits.shape
    step = max(1, _BLOCK_ELEMENTS[logits.device.type] // max(columns, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _widened(logits: torch.Tensor, inverse_temperature: torch.Tensor | None, block: slice) -> torch.Tensor:
    """A block's logits over their temperature, in new float32 memory."""
    # Widening first makes everything after it work in place on one type, twice as fast as mixed types on a CPU.
    wide = torch.empty(logits[block].shape, device=logits.device).copy_(logits[block])
    return wide if inverse_temperature is None else wide.mul_(inverse_temperature[block].unsqueeze(1))


def local_statistics(
    logits: torch.Tensor, inverse_temperature: torch.Tensor | None, with_entropy: bool
) -> tuple[torch.Tensor, ...]:
    """(peak, sum of exp(x)[, sum of x exp(x)]) with x = logit / temperature - peak, over this rank's columns.

    Args:
        logits: [n, columns] float32 or bfloat16, unchanged. Without columns the sums are 0 and the peak is lowest.
        inverse_temperature: [n] float32, or None for 1.

    Returns:
        [n] float32 each.
    """
    rows, columns = logits.shape
    sums = [torch.zeros(rows, device=logits.device) for _ in range(1 + with_entropy)]
    # Finite, so that a rank without columns weighs exp(lowest - peak) = 0 in the merge and never 0 * inf.
    peaks = torch.full((rows,), torch.finfo(torch.float32).min, device=logits.device)
    if columns == 0:
        return peaks, *sums
    for block in _row_blocks(logits):
        shifted = _widened(logits, inverse_temperature, block)
        torch.amax(shifted, dim=1, out=peaks[block])
        shifted.sub_(peaks[block].unsqueeze(1))
        exponentials = torch.exp(shifted) if with_entropy else shifted.exp_()
        torch.sum(exponentials, dim=1, out=sums[0][block])
        if with_entropy:
            torch.sum(shifted.mul_(exponentials), dim=1, out=sums[1][block])
    return peaks, *sums


def chunk_softmax(
    logits: torch.Tensor,
    targets: ChunkTargets,
    inverse_temperature: torch.Tensor | None,
    shard: VocabShard,
    with_entropy: bool,
) -> ChunkSoftmax:
    """Log-probabilities of the targets, and entropies, from this rank's logits, by one collective.

    Each rank sends peak, sums and target logit of its own columns; every rank merges all of them in the same
    order, so that the results are bitwise equal on all ranks.
    """
    peaks, *sums = local_statistics(logits, inverse_temperature, with_entropy)
    target_logits = torch.zeros_like(peaks)
    if logits.shape[1] > 0:
        picked = logits.gather(1, targets.column.unsqueeze(1)).squeeze(1).float()
        if inverse_temperature is not None:
            picked *= inverse_temperature
        target_logits = torch.where(targets.here, picked, target_logits)

    everyone = shard.gather(torch.stack([peaks, target_logits, *sums]))
    peaks = everyone[:, 0]
    peak = peaks.amax(dim=0)
    distance = peaks - peak
    scale = distance.exp()
    sum_exp = (everyone[:, 2] * scale).sum(dim=0)
    log_sum = sum_exp.log()
    # (target - peak) - log(sum) keeps float32's precision at large logits, and is never positive.
    logprobs = (everyone[:, 1].sum(dim=0) - peak) - log_sum
    entropy = None
    if with_entropy:
        entropy = log_sum - (scale * (everyone[:, 3] + distance * everyone[:, 2])).sum(dim=0) / sum_exp
    return ChunkSoftmax(logprobs, entropy, peak, sum_exp)


def logit_gradients_(
    logits: torch.Tensor,
    softmax: ChunkSoftmax,
    targets: ChunkTargets,
    inverse_temperature: torch.Tensor | None,
    logprob_slope: torch.Tensor,
    entropy_slope: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrites the logits by the derivative of a loss with respect to them, and returns them.

    With p the softmax, H the entropy, y the target and T the temperature, the derivative of a loss whose
    derivatives are a with respect to log p_y and b with respect to H is

        (a (1[j = y] - p_j) - b p_j (log p_j + H)) / T.

    Args:
        logits: [n, columns], this rank's, as :func:`chunk_softmax` saw them.
        logprob_slope: a, [n] float32.
        entropy_slope: b, [n] float32, or None for 0; it needs ``softmax.entropy``.
    """
    if logits.shape[1] == 0:
        return logits
    probability_scale = softmax.sum_exp.reciprocal()
    if inverse_temperature is not None:
        probability_scale = probability_scale * inverse_temperature
    constant = -logprob_slope * probability_scale
    factor = None
    if entropy_slope is not None and softmax.entropy is not None:
        # log p_j + H = x_j + (H - log sum_exp), so that b's term is one factor of x_j and one more constant.
        factor = -entropy_slope * probability_scale
        constant = constant + factor * (softmax.entropy - softmax.sum_exp.log())
    target_values = _target_gradients(softmax, inverse_temperature, logprob_slope, entropy_slope)

    for block in _row_blocks(logits):
        shifted = _widened(logits, inverse_temperature, block).sub_(softmax.peak[block].unsqueeze(1))
        if factor is None:
            gradients = shifted.exp_().mul_(constant[block].unsqueeze(1))
        else:
            exponentials = shifted.exp()
            gradients = shifted.mul_(factor[block].unsqueeze(1)).add_(constant[block].unsqueeze(1)).mul_(exponentials)
        logits[block] = gradients
    row = torch.arange(logits.shape[0], device=logits.device)
    kept = logits[row, targets.column]
    logits[row, targets.column] = torch.where(targets.here, target_values.to(logits.dtype), kept)
    return logits


def _target_gradients(
    softmax: ChunkSoftmax,
    inverse_temperature: torch.Tensor | None,
    logprob_slope: torch.Tensor,
    entropy_slope: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient at the target's own logit, [n] float32, where 1 - p_y must not cancel."""
    values = logprob_slope * -torch.expm1(softmax.logprobs)
    if entropy_slope is not None and softmax.entropy is not None:
        values = values - entropy_slope * softmax.logprobs.exp() * (softmax.logprobs + softmax.entropy)
    return values if inverse_temperature is None else values * inverse_temperature
