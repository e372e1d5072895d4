"""Regularisers that act only outside the Binary-TV trust region, abs(pi - mu) > delta (arXiv 2606.09821 eq. 23-25).

The mask is a constant in the gradient.
"""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms


def mask_drpo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - Mout abs(A) / (2 delta) mu (r - 1)^2 (eq. 23)."""
    return _quadratic_outside(terms, advantage, terms.shift, config)


def mask_spo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - Mout abs(A) / (2 delta) (r - 1)^2 (eq. 24)."""
    return _quadratic_outside(terms, advantage, terms.excess, config)


def mask_kl(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - Mout abs(A) / (2 delta) (log r)^2 / 2 (eq. 25)."""
    gain = terms.ratio * advantage
    pull = _outside(terms, config) * advantage.abs() * terms.log_ratio / (2 * config.delta)
    return Outcome(gain - pull * terms.log_ratio / 2, gain - pull)


def _outside(terms: Terms, config: ObjectiveConfig) -> torch.Tensor:
    return (terms.shift.abs() > config.delta).to(terms.shift.dtype)


def _quadratic_outside(
    terms: Terms, advantage: torch.Tensor, distance: torch.Tensor, config: ObjectiveConfig
) -> Outcome:
    # Both the mask and the distance stay finite at every finite ratio, so 0 * inf cannot arise.
    pull = _outside(terms, config) * advantage.abs() * distance / config.delta
    return Outcome(terms.ratio * advantage - pull * terms.excess / 2, terms.ratio * (advantage - pull))
