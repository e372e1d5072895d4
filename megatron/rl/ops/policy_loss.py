"""The policy-gradient loss of an output projection in one pass, without the logits of the batch."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.ops.chunking import Rows, active_rows, chunks
from megatron.rl.ops.gradients import ProjectionGradients
from megatron.rl.ops.projection import Projection
from megatron.rl.ops.softmax import ChunkSoftmax
from megatron.rl.ops.validation import check_tokens

Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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


def fused_linear_policy_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_weights: torch.Tensor,
    objective: Objective,
    *,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    entropy_coeff: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_chunk: int | None = None,
) -> PolicyLossOutput:
    """- sum(loss_weights * J) - entropy_coeff * sum(loss_weights * entropy), J by ``objective`` (arXiv 2606.09821).

    J's derivative with respect to a token's log-probability is known as soon as that is, so each chunk's gradients
    are taken while its logits exist: three matrix products in all, none in the backward pass, which only scales.
    Log-probabilities, objective and the weight's gradient are float32 whatever the inputs' type. The inputs are not
    changed. Without gradients enabled, none are computed.

    Args:
        hidden: [tokens, hidden_size] float32 or bfloat16; with ``sequence_parallel`` this rank's slice,
            [tokens / ranks, hidden_size].
        weight: [padded local vocabulary, hidden_size], of the same type. Rank r of the group holds the rows of
            tokens [r * n, (r + 1) * n); rows from ``vocab_size`` on are padding and enter nothing. A weight with a
            ``main_grad`` gets its gradient added there, by megatron-core's convention.
        target_ids: [tokens] integers, the sampled tokens.
        behavior_logprobs: [tokens] log mu, nats, at ``temperature``. Masked tokens may carry anything.
        advantages: [tokens].
        loss_weights: [tokens], mask and normalisation in one; tokens of weight 0 are masked: they are not multiplied
            and add exactly nothing.
        objective: (logp, logmu, advantage) -> (J, dJ/dlogp), element-wise on float32 tensors of the unmasked tokens.
        vocab_size: true size of the vocabulary, over all ranks.
        temperature: of sampling; logits are divided by it. A number, or one for each token.
        entropy_coeff: factor of the entropy bonus.
        tp_group: the ranks that share the vocabulary; None for one. All tensors but ``hidden`` (under sequence
            parallelism) and ``weight`` are equal on all of them.
        token_chunk: tokens multiplied at a time; None chooses.

    Raises:
        ConfigError: a vocabulary size, temperature or chunk that cannot be.
        TokenError: an unmasked token with a target outside the vocabulary, a log mu, advantage or weight that is not
            finite, or a ratio or objective that overflows float32. The message and ``token`` give its position.
        ValueError: shapes or types that do not fit together.
    """
    per_token = {"behavior_logprobs": behavior_logprobs, "advantages": advantages, "loss_weights": loss_weights}
    projection = Projection.of(
        hidden,
        weight,
        target_ids,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_chunk=token_chunk,
        per_token=per_token,
    )
    loss_weights = loss_weights.detach().float()
    rows = active_rows(loss_weights)
    job = _Job(
        projection,
        objective,
        rows,
        behavior_logprobs.detach().float()[rows],
        advantages.detach().float()[rows],
        loss_weights[rows],
        entropy_coeff,
    )
    job.check()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return PolicyLossOutput(*_PolicyLoss.apply(hidden, weight, job))
    return _run(hidden, weight, job, None)


@dataclass(frozen=True)
class _Job:
    """One call's inputs; per-token ones hold the n unmasked tokens only."""

    projection: Projection
    objective: Objective
    rows: Rows
    log_mu: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    entropy_coeff: float

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
        ] = self.projection.bad_targets(self.rows)
        check_tokens(problems, self.rows)


class _PolicyLoss(torch.autograd.Function):
    """Takes the gradients in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, job: _Job) -> tuple[torch.Tensor, ...]:
        ctx.gradients = ProjectionGradients(
            hidden,
            weight,
            job.projection,
            needed=ctx.needs_input_grad[:2],
            tokens=job.log_mu.shape[0],
            scaled_later=True,
        )
        output = _run(hidden, weight, job, ctx.gradients)
        ctx.gradients.wait()
        loss, *per_token = (getattr(output, field.name) for field in fields(output))
        ctx.mark_non_differentiable(*per_token)
        return loss, *per_token

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the policy loss hands its gradients out once; call it again for another backward pass")
        grad_hidden, grad_weight = ctx.gradients.deliver(grad_loss)
        ctx.gradients = None
        return grad_hidden, grad_weight, None


def _run(
    hidden: torch.Tensor, weight: torch.Tensor, job: _Job, gradients: ProjectionGradients | None
) -> PolicyLossOutput:
    """Goes through all chunks; adds their gradients, with respect to the loss, to ``gradients`` where given."""
    projection = job.projection
    all_hidden = projection.all_tokens(hidden)
    workspace = projection.workspace(weight, job.log_mu.shape[0])
    record = _Record(job)
    for part, rows in chunks(job.rows, projection.chunk):
        chunk_hidden = all_hidden[rows]
        logits = projection.logits(chunk_hidden, weight, workspace)
        softmax = projection.softmax(logits, rows, with_entropy=True)
        slope = record.add(part, softmax)
        if gradients is not None:
            loss_weights = job.loss_weights[part]
            entropy_slope = -job.entropy_coeff * loss_weights if job.entropy_coeff != 0 else None
            projection.logit_gradients_(logits, rows, softmax, -loss_weights * slope, entropy_slope)
            gradients.add(rows, logits, chunk_hidden)
    return record.output()


class _Record:
    """What the chunks give per token, and from it the loss."""

    def __init__(self, job: _Job):
        self._job = job
        names = ("objective", "slope", "logprobs", "entropy", "logsumexp")
        self._values = {name: torch.empty_like(job.log_mu) for name in names}

    def add(self, part: slice, softmax: ChunkSoftmax) -> torch.Tensor:
        """Enters a chunk's tokens; returns their dJ/dlogp."""
        job, values = self._job, self._values
        objective, slope = job.objective(softmax.logprobs, job.log_mu[part], job.advantages[part])
        values["objective"][part], values["slope"][part] = objective, slope
        values["logprobs"][part], values["logsumexp"][part] = softmax.logprobs, softmax.logsumexp
        assert softmax.entropy is not None  # the loss always asks for it
        values["entropy"][part] = softmax.entropy
        return slope

    def output(self) -> PolicyLossOutput:
        """The loss, and the per-token results at their places among all tokens. Raises :class:`TokenError`."""
        job, values = self._job, self._values
        log_ratio = values["logprobs"] - job.log_mu
        ratio = log_ratio.exp()
        finite = torch.isfinite(ratio) & torch.isfinite(values["objective"]) & torch.isfinite(values["slope"])
        rule = "the ratio of policy to behaviour, and the objective, must be finite in float32 at every unmasked token"
        check_tokens({f"{rule} (the log-ratio is shown)": (~finite, log_ratio)}, job.rows)

        loss = -torch.dot(job.loss_weights, values["objective"])
        if job.entropy_coeff != 0:
            loss = loss - job.entropy_coeff * torch.dot(job.loss_weights, values["entropy"])
        # 1 - smaller / larger, times the larger: keeps its precision where pi and mu nearly agree.
        tv = torch.maximum(values["logprobs"], job.log_mu).exp() * -torch.expm1(-log_ratio.abs())
        gain = ratio * job.advantages
        weight = torch.where(gain != 0, values["slope"] / gain, torch.ones_like(gain))
        per_token = (values["logprobs"], values["entropy"], tv, ratio, weight, values["logsumexp"])
        return PolicyLossOutput(loss, *(self._everywhere(x) for x in per_token))

    def _everywhere(self, values: torch.Tensor) -> torch.Tensor:
        if isinstance(self._job.rows, slice):
            return values
        everywhere = values.new_zeros(self._job.projection.target_ids.shape[0])
        everywhere[self._job.rows] = values
        return everywhere
