"""What one call of the policy loss is given, checked and in the order of its chunks, and what it finds per token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.rl.ops.chunking import Plan, Rows
from megatron.rl.ops.projection import Projection
from megatron.rl.ops.sequence_group import solve_together
from megatron.rl.ops.softmax import ChunkSoftmax
from megatron.rl.ops.validation import check_tokens

# Its attribute ``needs`` says what it is called with beyond one token's values: "token" (or none: nothing),
# "candidates" or "sequence". See megatron.rl.objectives.
Objective = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class PolicyLossOutput:
    """The loss, and what is known per token: [tokens], float32, detached, 0 for masked tokens."""

    loss: torch.Tensor  # scalar, float32, with gradient
    logprobs: torch.Tensor  # log pi of the target, nats, at most 0
    entropy: torch.Tensor  # of pi over the whole vocabulary, nats
    tv: torch.Tensor  # abs(pi - mu) of the target, in [0, 1]
    ratio: torch.Tensor  # r = pi / mu of the target
    weight: torch.Tensor  # w in dJ/dlogp = w r A; 1 where r A is 0, since no quotient exists there
    logsumexp: torch.Tensor  # of the logits at the temperature, nats


@dataclass(frozen=True)
class LossJob:
    """One call's inputs; per-token ones hold the n unmasked tokens only, in the order of the plan's chunks."""

    projection: Projection
    plan: Plan
    objective: Objective
    log_mu: torch.Tensor  # [n] of the sampled tokens
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    target_log_mu: torch.Tensor  # [n, targets] of the sampled token and the candidates; NaN where there is none
    sequence_ids: torch.Tensor | None
    sequence_group: ProcessGroup | None  # the ranks over which sequences are spread
    entropy_coeff: float
    grad_scale: float | None

    @classmethod
    def of(
        cls,
        projection: Projection,
        plan: Plan,
        objective: Objective,
        log_mu: torch.Tensor,
        advantages: torch.Tensor,
        loss_weights: torch.Tensor,
        *,
        candidates: tuple[torch.Tensor | None, torch.Tensor | None] | None,
        sequence_ids: torch.Tensor | None,
        sequence_group: ProcessGroup | None,
        entropy_coeff: float,
        grad_scale: float | None,
    ) -> "LossJob":
        """From tensors of all tokens. Raises ValueError where the objective lacks an input or has one too many."""
        needs = getattr(objective, "needs", "token")
        for name, given, wanted in (
            ("topk_ids and topk_logprobs", candidates, "candidates"),
            ("sequence_ids", sequence_ids, "sequence"),
        ):
            if (given is not None) != (needs == wanted):
                raise ValueError(f"this objective {'needs' if needs == wanted else 'has no use for'} {name}")
        target_log_mu = log_mu.unsqueeze(1)
        if candidates is not None:
            ids, candidate_log_mu = _distinct_candidates(projection, plan.rows, *candidates)
            projection = replace(projection, target_ids=torch.cat([projection.target_ids, ids], dim=1))
            target_log_mu = torch.cat([target_log_mu, candidate_log_mu], dim=1)
        rows = plan.rows
        return cls(
            projection,
            plan,
            objective,
            log_mu[rows],
            advantages[rows],
            loss_weights[rows],
            target_log_mu[rows],
            None if sequence_ids is None else sequence_ids[rows],
            sequence_group,
            entropy_coeff,
            grad_scale,
        )

    @property
    def of_sequences(self) -> bool:
        """Whether the objective must know the log-probabilities of whole sequences."""
        return self.sequence_ids is not None

    def check(self) -> None:
        """Raises :class:`TokenError` for the first unmasked token that cannot be trained on."""
        finite = {
            "the behaviour's log-probability of an unmasked token must be finite": self.log_mu,
            "the advantage of an unmasked token must be finite": self.advantages,
            "the loss weight of a token must be finite": self.loss_weights,
        }
        problems = {rule: (~torch.isfinite(values), values) for rule, values in finite.items()}
        problems[
            f"the target of an unmasked token must be in the vocabulary, from 0 to {self.projection.vocab_size - 1}"
        ] = self.projection.bad_targets(self.plan.rows)
        check_tokens(problems, self.plan.rows)

    def solve(self, part: slice, softmax: ChunkSoftmax) -> tuple[torch.Tensor, torch.Tensor]:
        """Of some tokens: J [n], and [n, targets] the derivative of sum(loss_weights * J) by log-probabilities."""
        log_mu, advantages, weights = self.log_mu[part], self.advantages[part], self.loss_weights[part]
        if self.sequence_ids is not None:
            logprobs = softmax.logprobs[:, 0]
            per_token, ids = (logprobs, log_mu, advantages, weights), self.sequence_ids[part]
            if self.sequence_group is None:
                value, slope = self.objective(*per_token, ids)
            else:
                value, slope = solve_together(self.objective, per_token, ids, self.sequence_group)
            return value, slope.unsqueeze(1)
        if self.target_log_mu.shape[1] > 1 or getattr(self.objective, "needs", "token") == "candidates":
            value, slopes = self.objective(softmax.logprobs, self.target_log_mu[part], advantages)
            return value, slopes * weights.unsqueeze(1)
        value, slope = self.objective(softmax.logprobs[:, 0], log_mu, advantages)
        return value, (slope * weights).unsqueeze(1)

    def entropy_slope(self, part: slice) -> torch.Tensor | None:
        """The loss's derivative with respect to the entropies of some of the tokens; None for 0."""
        if self.entropy_coeff == 0:
            return None
        return -self.entropy_coeff * self.loss_weights[part] * self.scale

    @property
    def scale(self) -> float:
        """What gradients are to be multiplied by before they are handed out."""
        return 1.0 if self.grad_scale is None else self.grad_scale

    def everywhere(self, values: torch.Tensor) -> torch.Tensor:
        """[n, ...] to [tokens, ...], with 0 for the masked tokens."""
        if isinstance(self.plan.rows, slice):
            return values
        everywhere = values.new_zeros(self.projection.tokens, *values.shape[1:])
        everywhere[self.plan.rows] = values
        return everywhere


def _distinct_candidates(
    projection: Projection, rows: Rows, ids: torch.Tensor | None, log_mu: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates beside the sampled token: ids [tokens, K], -1 for none, and log mu [tokens, K], NaN for none."""
    tokens = projection.tokens
    if ids is None or log_mu is None or ids.dim() != 2 or ids.shape != log_mu.shape or ids.shape[0] != tokens:
        shapes = [None if x is None else list(x.shape) for x in (ids, log_mu)]
        raise ValueError(f"topk_ids and topk_logprobs must both be [{tokens}, K] (got {shapes[0]} and {shapes[1]})")
    ids, log_mu = ids.long(), log_mu.detach().float()
    named, values = ids[rows], log_mu[rows]
    ordered = named.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    outside, unknown = named >= projection.vocab_size, (named >= 0) & ~(values < torch.inf)
    problems = {
        f"a candidate of an unmasked token must be in the vocabulary, from 0 to {projection.vocab_size - 1}": (
            outside,
            named,
        ),
        "a candidate's log-probability must be a number below infinity": (unknown, values),
        "a candidate must be named once": (twice, ordered[:, 1:]),
    }
    check_tokens({rule: _by_token(*problem) for rule, problem in problems.items()}, rows)
    present = (ids >= 0) & (ids != projection.target_ids[:, :1])
    return torch.where(present, ids, -1), torch.where(present, log_mu, torch.nan)


def _by_token(bad: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([n] whether any of a token's is bad, [n] the first that is)."""
    if bad.shape[1] == 0:
        return bad.new_zeros(bad.shape[0]), values.new_zeros(bad.shape[0])
    first = bad.byte().argmax(dim=1, keepdim=True)
    return bad.any(dim=1), values.gather(1, first).squeeze(1)


class Record:
    """What the chunks give per token, and from it the loss."""

    def __init__(self, job: LossJob):
        self._job = job
        names = ("objective", "slope", "logprobs", "entropy", "logsumexp")
        self._values: dict[str, Any] = {name: torch.empty_like(job.log_mu) for name in names}

    def add(self, part: slice, softmax: ChunkSoftmax) -> torch.Tensor:
        """Enters a chunk's tokens; returns the loss's derivative by their targets' log-probabilities, [n, targets]."""
        values = self._values
        objective, slopes = self._job.solve(part, softmax)
        values["objective"][part], values["slope"][part] = objective, slopes[:, 0]
        values["logprobs"][part], values["logsumexp"][part] = softmax.logprobs[:, 0], softmax.logsumexp
        assert softmax.entropy is not None  # the loss always asks for it
        values["entropy"][part] = softmax.entropy
        return slopes * -self._job.scale

    def output(self) -> PolicyLossOutput:
        """The loss, and the per-token results at their places among all tokens. Raises :class:`TokenError`."""
        job, values = self._job, self._values
        log_ratio = values["logprobs"] - job.log_mu
        ratio = log_ratio.exp()
        finite = torch.isfinite(ratio) & torch.isfinite(values["objective"]) & torch.isfinite(values["slope"])
        rule = "the ratio of policy to behaviour, and the objective, must be finite in float32 at every unmasked token"
        check_tokens({f"{rule} (the log-ratio is shown)": (~finite, log_ratio)}, job.plan.rows)

        loss = -torch.dot(job.loss_weights, values["objective"])
        if job.entropy_coeff != 0:
            loss = loss - job.entropy_coeff * torch.dot(job.loss_weights, values["entropy"])
        # 1 - smaller / larger, times the larger: keeps its precision where pi and mu nearly agree.
        tv = torch.maximum(values["logprobs"], job.log_mu).exp() * -torch.expm1(-log_ratio.abs())
        gain = job.loss_weights * ratio * job.advantages
        weight = torch.where(gain != 0, values["slope"] / gain, torch.ones_like(gain))
        per_token = (values["logprobs"], values["entropy"], tv, ratio, weight, values["logsumexp"])
        return PolicyLossOutput(loss, *(job.everywhere(x) for x in per_token))
