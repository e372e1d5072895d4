"""What a run reports about its trust region, per token."""

from typing import NamedTuple

import torch

from megatron.rl.objectives.terms import compute_terms


class TokenDiagnostics(NamedTuple):
    """Per token, float32, detached."""

    tv: torch.Tensor  # abs(pi - mu), in [0, 1]
    ratio: torch.Tensor  # r = pi / mu
    weight: torch.Tensor  # w, from dJ/dlogp = w r A


def token_diagnostics(
    logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor, slope: torch.Tensor
) -> TokenDiagnostics:
    """Binary-TV shift, ratio and gradient weight of each token (arXiv 2606.09821 eq. 7, 10).

    Args:
        logp, logmu: log-probabilities of the sampled tokens in nats, any equal shape.
        advantage: their advantages.
        slope: dJ/dlogp, the second output of an objective.

    The weight is slope / (r A). Where r A is zero or not finite (no advantage, a ratio beyond float32) that quotient
    does not exist and the weight is 1, the plain policy gradient's. A token whose logmu is NaN or infinite is taken
    for a masked one: all three are 0.
    """
    with torch.no_grad():
        log_pi, log_mu = logp.float(), logmu.float()
        known = torch.isfinite(log_mu)
        terms = compute_terms(log_pi, torch.where(known, log_mu, log_pi))
        gain = terms.ratio * advantage.float()
        weight = torch.where(torch.isfinite(gain) & (gain != 0), slope.float() / gain, torch.ones_like(gain))
        nothing = torch.zeros_like(gain)
        tv, ratio, weight = (torch.where(known, x, nothing) for x in (terms.shift.abs(), terms.ratio, weight))
        return TokenDiagnostics(tv, ratio, weight)
