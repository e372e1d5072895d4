"""What every objective is made of: the ratio, its distance from one, and the shift of the probability.

All of it comes from the two log-probabilities without a difference of nearly equal numbers, so it keeps
float32's relative precision where policy and behaviour agree to the last digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.rl.config import ObjectiveConfig


class Terms(NamedTuple):
    """Per token, float32. pi and mu are the policy's and the behaviour's probability of the sampled token."""

    log_pi: torch.Tensor  # nats
    log_mu: torch.Tensor  # nats
    log_ratio: torch.Tensor  # log(pi / mu), nats
    ratio: torch.Tensor  # r = pi / mu
    excess: torch.Tensor  # r - 1
    shift: torch.Tensor  # pi - mu, in [-1, 1]; its magnitude is the Binary-TV (eq. 7)


class Outcome(NamedTuple):
    """A per-token objective and its derivative, float32."""

    value: torch.Tensor  # J, to be maximised
    slope: torch.Tensor  # dJ / dlogp


Formula = Callable[[Terms, torch.Tensor, ObjectiveConfig], Outcome]


def compute_terms(log_pi: torch.Tensor, log_mu: torch.Tensor) -> Terms:
    """The :class:`Terms` of float32 log-probabilities, at any log-ratio.

    The ratio is infinite where exp overflows float32 (log-ratio above 88.7); it is never clamped, since a clamp
    zeroes the gradient of the very tokens that a trust region corrects.
    """
    log_ratio = log_pi - log_mu
    # (1 - smaller / larger) of the two probabilities, times the larger: neither factor can overflow.
    shift = torch.sign(log_ratio) * torch.exp(torch.maximum(log_pi, log_mu)) * -torch.expm1(-log_ratio.abs())
    return Terms(log_pi, log_mu, log_ratio, torch.exp(log_ratio), torch.expm1(log_ratio), shift)


def strength(advantage: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    """The regulariser's factor: abs(A), or 1 with the advantage weight off (fig. 4)."""
    return advantage.abs() if config.advantage_weight else torch.ones_like(advantage)
