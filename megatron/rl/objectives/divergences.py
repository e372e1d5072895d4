"""Other divergences as the regulariser, which DRPO is compared with (arXiv 2606.09821 app. C)."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms, strength


def kl(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A + abs(A) / (2 delta) log r (eq. 12, 15-17); abs(A) is 1 without the advantage weight (app. D.1)."""
    gain = terms.ratio * advantage
    pull = strength(advantage, config) / (2 * config.delta)
    return Outcome(gain + pull * terms.log_ratio, gain + pull)


def k3(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - abs(A) / (2 delta) (r - 1 - log r) (eq. 13, 18, 19)."""
    gain = terms.ratio * advantage
    pull = advantage.abs() / (2 * config.delta)
    return Outcome(gain - pull * (terms.excess - terms.log_ratio), gain - pull * terms.excess)


def tv(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - abs(A) / (2 delta) abs(r - 1) (eq. 14, 20-22); abs(A) is 1 without the advantage weight (fig. 7).

    At r = 1 the penalty's derivative is taken as 0.
    """
    pull = strength(advantage, config) / (2 * config.delta)
    value = terms.ratio * advantage - pull * terms.excess.abs()
    return Outcome(value, terms.ratio * (advantage - pull * torch.sign(terms.excess)))
