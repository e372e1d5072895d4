"""Softmax over a vocabulary that may be split over ranks, and its gradient, for one chunk of tokens.

Between the two passes over the logits (:mod:`megatron.rl.ops.elementwise`) lies the one collective.
"""

from types import ModuleType
from typing import NamedTuple

import torch

from megatron.rl.ops.chunking import Rows
from megatron.rl.ops.vocab_shard import VocabShard


class ChunkSoftmax(NamedTuple):
    """Per token of a chunk, over the whole vocabulary, float32."""

    logprobs: torch.Tensor  # [n, targets] log-probabilities of each token's targets, nats, at most 0
    entropy: torch.Tensor | None  # [n] nats; None where not asked for
    peak: torch.Tensor  # [n] largest logit
    sum_exp: torch.Tensor  # [n] sum of exp(logit - peak), at least 1

    @property
    def logsumexp(self) -> torch.Tensor:
        """log of the sum of exp(logit), nats, [n]."""
        return self.peak + self.sum_exp.log()

    def at(self, rows: Rows) -> "ChunkSoftmax":
        """The same for some of the tokens."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return ChunkSoftmax(self.logprobs[rows], entropy, self.peak[rows], self.sum_exp[rows])


class ChunkTargets(NamedTuple):
    """Where the targets of a chunk lie among this rank's columns; a token may have several, all different."""

    column: torch.Tensor  # [n, targets] int64, 0 where the target is another rank's or nobody's
    here: torch.Tensor  # [n, targets] bool

    @classmethod
    def of(cls, target_ids: torch.Tensor, shard: VocabShard) -> "ChunkTargets":
        """The columns on ``shard`` of ``target_ids`` [n, targets]; a negative id is no target."""
        column = target_ids - shard.start
        here = (target_ids >= 0) & (column >= 0) & (column < shard.rows)
        return cls(torch.where(here, column, 0), here)


def chunk_softmax(
    passes: ModuleType,
    logits: torch.Tensor,
    targets: ChunkTargets,
    inverse_temperature: torch.Tensor | None,
    shard: VocabShard,
    with_entropy: bool,
) -> ChunkSoftmax:
    """Log-probabilities of the targets, and entropies, from this rank's logits [n, columns], by one collective.

    Each rank sends peak, sums and target logits of its own columns; every rank merges all of them in the same
    order, so that the results are bitwise equal on all ranks.
    """
    peaks, *sums = _local_statistics(passes, logits, inverse_temperature, with_entropy)
    target_logits = torch.zeros(targets.column.shape, device=logits.device)
    if logits.shape[1] > 0:
        picked = logits.gather(1, targets.column).float()
        if inverse_temperature is not None:
            picked *= inverse_temperature.unsqueeze(1)
        target_logits = torch.where(targets.here, picked, target_logits)

    mine = torch.cat([torch.stack([peaks, *sums]), target_logits.t()])
    everyone = shard.gather(mine)
    peaks = everyone[:, 0]
    peak = peaks.amax(dim=0)
    distance = peaks - peak
    scale = distance.exp()
    sum_exp = (everyone[:, 1] * scale).sum(dim=0)
    log_sum = sum_exp.log()
    # (target - peak) - log(sum) keeps float32's precision at large logits, and is never positive.
    logprobs = (everyone[:, 1 + len(sums) :].sum(dim=0) - peak) - log_sum
    entropy = None
    if with_entropy:
        entropy = log_sum - (scale * (everyone[:, 2] + distance * everyone[:, 1])).sum(dim=0) / sum_exp
    return ChunkSoftmax(logprobs.t(), entropy, peak, sum_exp)


def _local_statistics(
    passes: ModuleType, logits: torch.Tensor, inverse_temperature: torch.Tensor | None, with_entropy: bool
) -> list[torch.Tensor]:
    """Peak and sums over this rank's columns, [n] each; without columns the sums are 0 and the peak is lowest."""
    rows, columns = logits.shape
    if rows == 0 or columns == 0:
        # Finite, so that a rank without columns weighs exp(lowest - peak) = 0 in the merge and never 0 * inf.
        lowest = torch.full((rows,), torch.finfo(torch.float32).min, device=logits.device)
        return [lowest, *(torch.zeros_like(lowest) for _ in range(1 + with_entropy))]
    peak, sum_exp, weighted = passes.statistics(logits, inverse_temperature, with_entropy)
    return [peak, sum_exp] if weighted is None else [peak, sum_exp, weighted]


def logit_gradients_(
    passes: ModuleType,
    logits: torch.Tensor,
    softmax: ChunkSoftmax,
    targets: ChunkTargets,
    inverse_temperature: torch.Tensor | None,
    logprob_slopes: torch.Tensor,
    entropy_slope: torch.Tensor | None,
) -> torch.Tensor:
    """Overwrites the logits by the derivative of a loss with respect to them, and returns them.

    With p the softmax, H the entropy, S the targets and T the temperature, the derivative of a loss whose
    derivatives are a_y with respect to log p_y for y in S, and b with respect to H, is

        (a_j [j in S] - p_j sum(a) - b p_j (log p_j + H)) / T.

    Args:
        logits: [n, columns], this rank's, as :func:`chunk_softmax` saw them.
        logprob_slopes: a, [n, targets] float32; 0 where a token has no such target.
        entropy_slope: b, [n] float32, or None for 0; it needs ``softmax.entropy``.
    """
    if logits.numel() == 0:
        return logits
    probability_scale = softmax.sum_exp.reciprocal()
    if inverse_temperature is not None:
        probability_scale = probability_scale * inverse_temperature
    total = logprob_slopes.sum(dim=1)
    constant = -total * probability_scale
    factor = None
    if entropy_slope is not None and softmax.entropy is not None:
        # log p_j + H = x_j + (H - log sum_exp), so that b's term is one factor of x_j and one more constant.
        factor = -entropy_slope * probability_scale
        constant = constant + factor * (softmax.entropy - softmax.sum_exp.log())
    values = _target_gradients(softmax, inverse_temperature, logprob_slopes, total, entropy_slope)
    passes.gradients_(logits, inverse_temperature, softmax.peak, constant, factor)
    _write_(logits, targets, values)
    return logits


def _write_(logits: torch.Tensor, targets: ChunkTargets, values: torch.Tensor) -> None:
    """Sets the targets that are here to ``values`` [n, targets], without waiting for the device."""
    # Where a target is not here, the row's first one that is gets its value once more, or column 0 its own.
    first = targets.here.byte().argmax(dim=1, keepdim=True)
    place = targets.column.gather(1, first)
    repeated = torch.where(targets.here.gather(1, first), values.gather(1, first), logits.gather(1, place).float())
    columns = torch.where(targets.here, targets.column, place)
    # Not scatter_, which on a CPU goes through all of the logits.
    row = torch.arange(logits.shape[0], device=logits.device).unsqueeze(1)
    logits[row, columns] = torch.where(targets.here, values, repeated).to(logits.dtype)


def _target_gradients(
    softmax: ChunkSoftmax,
    inverse_temperature: torch.Tensor | None,
    slopes: torch.Tensor,
    total: torch.Tensor,
    entropy_slope: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient at the targets' own logits, [n, targets] float32, where 1 - p_y must not cancel."""
    probabilities = softmax.logprobs.exp()
    values = slopes * -torch.expm1(softmax.logprobs) - probabilities * (total.unsqueeze(1) - slopes)
    if entropy_slope is not None and softmax.entropy is not None:
        log_ratio = softmax.logprobs + softmax.entropy.unsqueeze(1)
        values = values - entropy_slope.unsqueeze(1) * probabilities * log_ratio
    return values if inverse_temperature is None else values * inverse_temperature.unsqueeze(1)
