"""Objectives by name."""

import math
from collections.abc import Callable

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.errors import ConfigError
from megatron.rl.objectives.divergences import k3, kl, tv
from megatron.rl.objectives.dppo import dppo, dppo_kl
from megatron.rl.objectives.drpo import drpo
from megatron.rl.objectives.grpo import grpo
from megatron.rl.objectives.masked import mask_drpo, mask_kl, mask_spo
from megatron.rl.objectives.policy_gradient import pg
from megatron.rl.objectives.spo import spo
from megatron.rl.objectives.terms import Formula, Outcome, compute_terms

OBJECTIVES: dict[str, Formula] = {
    "pg": pg,
    "grpo": grpo,
    "spo": spo,
    "dppo": dppo,
    "dppo-kl": dppo_kl,
    "drpo": drpo,
    "kl": kl,
    "k3": k3,
    "tv": tv,
    "mask-drpo": mask_drpo,
    "mask-spo": mask_spo,
    "mask-kl": mask_kl,
}
_UNWEIGHTED = ("drpo", "spo", "kl", "tv")  # those that the paper also defines without abs(A)

Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Outcome]


def get_objective(
    name: str,
    *,
    delta: float = 12.5,
    eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    advantage_weight: bool = True,
) -> Objective:
    """The per-token objective called ``name`` (a key of :data:`OBJECTIVES`), from arXiv 2606.09821.

    Args:
        name: which objective.
        delta: trust-region size of drpo, dppo, dppo-kl, kl, k3, tv and the mask-* family.
        eps: ratio bound of spo.
        eps_low, eps_high: lower and upper clip of grpo.
        advantage_weight: weight the regulariser by abs(advantage); False for drpo, spo, kl and tv only.

    Returns:
        A function (logp, logmu, advantage) -> (J, dJ/dlogp) of equally shaped tensors, element-wise, in
        float32: the policy's and the behaviour's log-probability of each sampled token in nats, and its
        advantage. J is maximised. A token whose logmu is NaN or infinite has no ratio: it adds exactly nothing
        to J and to dJ/dlogp. (Whoever knows the mask must refuse such a token where it is not masked.) A ratio
        that overflows float32 comes out infinite, never clamped.

    Raises:
        ConfigError: an unknown name, a bound that is not positive and finite, or no advantage weight where the
            objective has no such form.
    """
    config = ObjectiveConfig(name, delta, eps, eps_low, eps_high, advantage_weight)
    _check(config)
    formula = OBJECTIVES[name]

    def objective(logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor) -> Outcome:
        log_pi, log_mu = logp.float(), logmu.float()
        known = torch.isfinite(log_mu)
        outcome = formula(compute_terms(log_pi, torch.where(known, log_mu, log_pi)), advantage.float(), config)
        nothing = torch.zeros_like(log_pi)
        return Outcome(torch.where(known, outcome.value, nothing), torch.where(known, outcome.slope, nothing))

    return objective


def _check(config: ObjectiveConfig) -> None:
    if config.name not in OBJECTIVES:
        raise ConfigError(f"the objective must be one of {', '.join(OBJECTIVES)} (got {config.name!r})")
    for bound in ("delta", "eps", "eps_low", "eps_high"):
        size = getattr(config, bound)
        if not (size > 0 and math.isfinite(size)):
            raise ConfigError(f"{bound} of objective {config.name} must be a positive number (got {size})")
    if not config.advantage_weight and config.name not in _UNWEIGHTED:
        raise ConfigError(
            f"the advantage weight can be switched off for {', '.join(_UNWEIGHTED)} only (got {config.name!r})"
        )
