"""DPPO: a hard mask where the policy has left a divergence's trust region and would move further out."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, Terms


def dppo(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = M r A with M = 0 where sign(A) (pi - mu) > delta, else 1 (arXiv 2606.09821 eq. 6, 7)."""
    return _masked_gain(terms, advantage, torch.sign(advantage) * terms.shift > config.delta)


def dppo_kl(terms: Terms, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = M r A with M = 0 where the Binary-KL exceeds delta and sign(A) (pi - mu) > 0, else 1.

    The divergence is mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), the binary form of KL(mu || pi).
    """
    leaving = torch.sign(advantage) * terms.shift > 0
    return _masked_gain(terms, advantage, leaving & (_binary_kl(terms) > config.delta))


def _binary_kl(terms: Terms) -> torch.Tensor:
    mu = torch.exp(terms.log_mu)
    rest_of_mu = -torch.expm1(terms.log_mu)
    log_rest_ratio = torch.log(rest_of_mu) - torch.log(-torch.expm1(terms.log_pi))
    # At mu = 1 nothing is left of mu, and 0 log 0 counts as 0.
    rest = torch.where(rest_of_mu > 0, rest_of_mu * log_rest_ratio, torch.zeros_like(mu))
    return rest - mu * terms.log_ratio


def _masked_gain(terms: Terms, advantage: torch.Tensor, outside: torch.Tensor) -> Outcome:
    gain = torch.where(outside, torch.zeros_like(advantage), terms.ratio * advantage)
    return Outcome(gain, gain)
