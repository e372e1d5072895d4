"""The plain off-policy policy gradient, without a trust region."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms


def pg(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A (arXiv 2606.09821 eq. 2)."""
    gain = terms.ratio * advantage
    return Outcome(gain, gain)
