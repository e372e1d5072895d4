"""Objectives whose ratio is a whole sequence's."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome


def gspo(
    logp: torch.Tensor,
    logmu: torch.Tensor,
    advantage: torch.Tensor,
    loss_weights: torch.Tensor,
    sequence_ids: torch.Tensor,
    config: ObjectiveConfig,
) -> Outcome:
    """J = min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), s the geometric mean of a sequence's ratios (GSPO).

    Group Sequence Policy Optimization is arXiv 2507.18071, eq. 5 to 7; its clip range is of the order of 3e-4.

    Args:
        logp, logmu, advantage, loss_weights: [n], of the unmasked tokens.
        sequence_ids: [n] integers; tokens of one number are one sequence, in any order.

    Returns:
        J [n] of each token, with its sequence's s, and the derivative of sum(loss_weights * J) with respect to
        each token's log-probability, [n].
    """
    names, sequence = sequence_ids.unique(return_inverse=True)

    def summed(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(names.shape[0]).index_add(0, sequence, values)

    length = summed(torch.ones_like(logp))
    mean = summed(logp - logmu) / length
    excess, ratio = torch.expm1(mean)[sequence], torch.exp(mean)
    gain = ratio[sequence] * advantage
    clipped = (1 + excess.clamp(-config.eps_low, config.eps_high)) * advantage
    outside = ((advantage > 0) & (excess > config.eps_high)) | ((advantage < 0) & (excess < -config.eps_low))
    by_mean = summed(torch.where(outside, torch.zeros_like(gain), loss_weights * gain))
    return Outcome(torch.where(outside, clipped, gain), (by_mean / length)[sequence])
