"""SPO: a quadratic penalty on the ratio in place of the clip."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms, strength


def spo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - abs(A) / (2 eps) (r - 1)^2 (arXiv 2606.09821 eq. 5); abs(A) is 1 without the advantage weight."""
    pull = strength(advantage, config) * terms.excess / config.eps
    return Outcome(terms.ratio * advantage - pull * terms.excess / 2, terms.ratio * (advantage - pull))
