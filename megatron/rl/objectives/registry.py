"""Objectives by name."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from megatron.rl.config import ObjectiveConfig
from megatron.rl.errors import ConfigError
from megatron.rl.objectives.candidates import drpo_topk
from megatron.rl.objectives.divergences import k3, kl, tv
from megatron.rl.objectives.dppo import dppo, dppo_kl
from megatron.rl.objectives.drpo import drpo
from megatron.rl.objectives.grpo import grpo
from megatron.rl.objectives.masked import mask_drpo, mask_kl, mask_spo
from megatron.rl.objectives.policy_gradient import pg
from megatron.rl.objectives.sequences import gspo
from megatron.rl.objectives.spo import spo
from megatron.rl.objectives.terms import Formula, Outcome, compute_terms

# Element-wise formulas of the sampled token.
TOKEN_OBJECTIVES: dict[str, Formula] = {
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
OBJECTIVES = (*TOKEN_OBJECTIVES, "gspo", "drpo-topk")
UNWEIGHTED = ("drpo", "spo", "kl", "tv")  # those that the paper also defines without abs(A)
# Those that read other numbers of the configuration than delta.
_PARAMETERS = {"pg": (), "spo": ("eps",), "grpo": ("eps_low", "eps_high"), "gspo": ("eps_low", "eps_high")}


@dataclass(frozen=True)
class TokenObjective:
    """Element-wise: (logp, logmu, advantage) -> (J, dJ/dlogp) of equally shaped tensors, in float32.

    A token whose logmu is NaN or infinite has no ratio: it adds exactly nothing to J and to dJ/dlogp. (Whoever
    knows the mask must refuse such a token where it is not masked.) A ratio that overflows float32 comes out
    infinite, never clamped.
    """

    config: ObjectiveConfig
    needs: ClassVar[Literal["token"]] = "token"

    def __call__(self, logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor) -> Outcome:
        log_pi, log_mu = logp.float(), logmu.float()
        known = torch.isfinite(log_mu)
        terms = compute_terms(log_pi, torch.where(known, log_mu, log_pi))
        outcome = TOKEN_OBJECTIVES[self.config.name](terms, advantage.float(), self.config)
        nothing = torch.zeros_like(log_pi)
        return Outcome(torch.where(known, outcome.value, nothing), torch.where(known, outcome.slope, nothing))


@dataclass(frozen=True)
class CandidateObjective:
    """Called with [n, 1 + K] logp and logmu and [n] advantages: :func:`megatron.rl.objectives.candidates.drpo_topk`."""

    config: ObjectiveConfig
    needs: ClassVar[Literal["candidates"]] = "candidates"

    def __call__(self, logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor) -> Outcome:
        return drpo_topk(logp.float(), logmu.float(), advantage.float(), self.config)


@dataclass(frozen=True)
class SequenceObjective:
    """Called with all unmasked tokens of whole sequences: :func:`megatron.rl.objectives.sequences.gspo`."""

    config: ObjectiveConfig
    needs: ClassVar[Literal["sequence"]] = "sequence"

    def __call__(
        self,
        logp: torch.Tensor,
        logmu: torch.Tensor,
        advantage: torch.Tensor,
        loss_weights: torch.Tensor,
        sequence_ids: torch.Tensor,
    ) -> Outcome:
        per_token = (logp.float(), logmu.float(), advantage.float(), loss_weights.float())
        return gspo(*per_token, sequence_ids, self.config)


Objective = TokenObjective | CandidateObjective | SequenceObjective


def get_objective(
    name: str,
    *,
    delta: float = 12.5,
    eps: float = 0.2,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    advantage_weight: bool = True,
) -> Objective:
    """The objective called ``name`` (one of :data:`OBJECTIVES`), from arXiv 2606.09821 where not said otherwise.

    Args:
        name: which objective. ``gspo`` needs whole sequences, ``drpo-topk`` the behaviour's most probable tokens;
            all others need the sampled token only. J is maximised.
        delta: trust-region size of drpo, drpo-topk, dppo, dppo-kl, kl, k3, tv and the mask-* family.
        eps: ratio bound of spo.
        eps_low, eps_high: lower and upper clip of grpo and gspo.
        advantage_weight: weight the regulariser by abs(advantage); False for drpo, spo, kl and tv only.

    Raises:
        ConfigError: an unknown name, a bound that is not positive and finite, or no advantage weight where the
            objective has no such form.
    """
    config = ObjectiveConfig(name, delta, eps, eps_low, eps_high, advantage_weight)
    _check(config)
    if name == "gspo":
        return SequenceObjective(config)
    if name == "drpo-topk":
        return CandidateObjective(config)
    return TokenObjective(config)


def parameters_of(name: str) -> tuple[str, ...]:
    """The fields of :class:`ObjectiveConfig` that size the objective's trust region; the others leave it as it is."""
    return _PARAMETERS.get(name, ("delta",))


def _check(config: ObjectiveConfig) -> None:
    if config.name not in OBJECTIVES:
        raise ConfigError(f"the objective must be one of {', '.join(OBJECTIVES)} (got {config.name!r})")
    for bound in ("delta", "eps", "eps_low", "eps_high"):
        size = getattr(config, bound)
        if not (size > 0 and math.isfinite(size)):
            raise ConfigError(f"{bound} of objective {config.name} must be a positive number (got {size})")
    if not config.advantage_weight and config.name not in UNWEIGHTED:
        raise ConfigError(
            f"the advantage weight can be switched off for {', '.join(UNWEIGHTED)} only (got {config.name!r})"
        )
