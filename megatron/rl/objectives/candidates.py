"""Objectives that see more of the distribution than the sampled token: the behaviour's most probable tokens."""

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives.terms import Outcome, compute_terms


def drpo_topk(logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor, config: ObjectiveConfig) -> Outcome:
    """J = r A - abs(A) / (2 delta) sum over S of (pi_a - mu_a)^2, S the sampled token and the candidates.

    DRPO's penalty mu (r - 1)^2 (arXiv 2606.09821 eq. 8) is a one-sample estimate of that sum over the whole
    vocabulary, for tokens sampled from mu (sec. 3.2); over the candidates it is exact, so of lower variance.

    Args:
        logp, logmu: [n, 1 + K] log-probabilities in nats of the sampled token, in the first column, and of the
            candidates. logmu may be -inf, for a mu of 0, and is NaN where there is no candidate.
        advantage: [n].

    Returns:
        J [n], and its derivative with respect to each log-probability, [n, 1 + K].
    """
    terms = compute_terms(logp, torch.where(logmu.isnan(), logp, logmu))
    pull = (advantage.abs() / config.delta).unsqueeze(1) * terms.shift
    gain = terms.ratio[:, 0] * advantage
    slope = -pull * torch.exp(logp)
    slope[:, 0] += gain
    return Outcome(gain - (pull * terms.shift).sum(dim=1) / 2, slope)
