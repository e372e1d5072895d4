"""The clipped ratio of PPO and GRPO."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms


def grpo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (arXiv 2606.09821 eq. 4).

    The gradient is that of r A inside the clip range and zero past the bound that the advantage pushes towards.
    """
    gain = terms.ratio * advantage
    clipped = terms.ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * advantage
    too_high = (advantage > 0) & (terms.excess > config.eps_high)
    too_low = (advantage < 0) & (terms.excess < -config.eps_low)
    outside = too_high | too_low
    return Outcome(torch.where(outside, clipped, gain), torch.where(outside, torch.zeros_like(gain), gain))
