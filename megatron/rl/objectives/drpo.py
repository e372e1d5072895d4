"""DRPO: DPPO's Binary-TV trust region as a smooth regulariser."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms, strength


def drpo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - abs(A) / (2 delta) mu (r - 1)^2 (arXiv 2606.09821 eq. 8); abs(A) is 1 without the advantage weight.

    The gradient weight is w = 1 - sign(A) (pi - mu) / delta, within [1 - 1/delta, 1 + 1/delta] (eq. 10). The
    penalty is computed as (pi - mu) (r - 1): mu (r - 1)^2 overflows float32 at a log-ratio of 50.
    """
    pull = strength(advantage, config) * terms.shift / config.delta
    return Outcome(terms.ratio * advantage - pull * terms.excess / 2, terms.ratio * (advantage - pull))
