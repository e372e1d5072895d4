"""The policy-gradient loss of an output projection, without the logits of the batch."""

from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.ops.chunking import active_rows
from megatron.rl.ops.gradients import ProjectionGradients
from megatron.rl.ops.loss_job import LossJob, Objective, PolicyLossOutput, Record
from megatron.rl.ops.projection import ChunkSolver, Projection
from megatron.rl.ops.two_pass import add_gradients, softmax_of


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
    topk_ids: torch.Tensor | None = None,
    topk_logprobs: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    grad_scale: float | None = None,
) -> PolicyLossOutput:
    """- sum(loss_weights * J) - entropy_coeff * sum(loss_weights * entropy), J by ``objective`` (arXiv 2606.09821).

    J's derivative with respect to a token's log-probability is known as soon as that is, so each chunk's gradients
    are taken while its logits exist: three matrix products in all, none in the backward pass, which only scales.
    An objective of whole sequences takes a fourth: its chunks are multiplied twice. Log-probabilities, objective and
    the weight's gradient are float32 whatever the inputs' type. The inputs are not changed. Without gradients
    enabled, none are computed.

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
        objective: what :func:`megatron.rl.objectives.get_objective` returns, or any function
            (logp, logmu, advantage) -> (J, dJ/dlogp), element-wise on float32 tensors of the unmasked tokens.
        vocab_size: true size of the vocabulary, over all ranks.
        temperature: of sampling; logits are divided by it. A number, or one for each token.
        entropy_coeff: factor of the entropy bonus.
        tp_group: the ranks that share the vocabulary; None for one. All tensors but ``hidden`` (under sequence
            parallelism) and ``weight`` are equal on all of them.
        token_chunk: tokens multiplied at a time; None chooses.
        topk_ids, topk_logprobs: [tokens, K], for an objective of candidates (drpo-topk): the behaviour's most
            probable tokens and their log mu. The sampled token counts once, whether it is among them or not. A
            negative id stands for no candidate, a log mu of -inf for a mu of 0.
        sequence_ids: [tokens] integers, for an objective of whole sequences (gspo): which one each token belongs to.
            A sequence's unmasked tokens must all be in this call, of the ranks of ``sequence_group`` together.
        sequence_group: the ranks over which sequences are spread (context parallelism), whose numbers in
            ``sequence_ids`` then agree; None where each rank has whole ones.
        grad_scale: the gradient that the loss will receive in the backward pass, where the caller knows it. Then the
            weight's gradient goes straight into a float32 ``main_grad``, already in the forward pass, and needs no
            memory of its own. (After an error ``main_grad`` is then undefined.)

    Raises:
        ConfigError: a vocabulary size, temperature or chunk that cannot be.
        TokenError: an unmasked token with a target or candidate outside the vocabulary, a candidate named twice, a
            log mu, advantage or weight that is not finite, or a ratio or objective that overflows float32. The
            message and ``token`` give its position.
        ValueError: shapes or types that do not fit together, or an objective without the inputs that it needs.
        RuntimeError: in the backward pass, a second one, or a gradient of the loss other than ``grad_scale``.
    """
    per_token = {"behavior_logprobs": behavior_logprobs, "advantages": advantages, "loss_weights": loss_weights}
    if sequence_ids is not None:
        per_token["sequence_ids"] = sequence_ids
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
    job = LossJob.of(
        projection,
        projection.plan(active_rows(loss_weights)),
        objective,
        behavior_logprobs.detach().float(),
        advantages.detach().float(),
        loss_weights,
        candidates=None if topk_ids is None and topk_logprobs is None else (topk_ids, topk_logprobs),
        sequence_ids=sequence_ids,
        sequence_group=sequence_group,
        entropy_coeff=entropy_coeff,
        grad_scale=grad_scale,
    )
    job.check()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return PolicyLossOutput(*_PolicyLoss.apply(hidden, weight, job))
    return _run(hidden, weight, job, None)


class _PolicyLoss(torch.autograd.Function):
    """Takes the gradients in the forward pass; the backward pass scales them, or finds them scaled."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, job: LossJob) -> tuple[torch.Tensor, ...]:
        needed = ctx.needs_input_grad[:2]
        final = job.grad_scale is not None
        ctx.gradients = ProjectionGradients(hidden, weight, job.projection, job.plan, needed=needed, final=final)
        ctx.grad_scale = job.grad_scale
        try:
            output = _run(hidden, weight, job, ctx.gradients)
        finally:
            ctx.gradients.wait()  # also where an error ends the call: no collective is left behind
        loss, *per_token = (getattr(output, field.name) for field in fields(output))
        ctx.mark_non_differentiable(*per_token)
        return loss, *per_token

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        gradients: ProjectionGradients | None = ctx.gradients
        if gradients is None:
            raise RuntimeError("the policy loss hands its gradients out once; call it again for another backward pass")
        ctx.gradients = None
        if ctx.grad_scale is None:
            return *gradients.deliver(grad_loss), None
        # Whoever divides by the number of micro-batches and multiplies by it again is off by a rounding.
        if abs(grad_loss.item() - ctx.grad_scale) > 1e-6 * abs(ctx.grad_scale):
            raise RuntimeError(f"grad_scale was {ctx.grad_scale}, but the loss's gradient is {grad_loss.item()}")
        return *gradients.deliver(None), None


def _run(
    hidden: torch.Tensor, weight: torch.Tensor, job: LossJob, gradients: ProjectionGradients | None
) -> PolicyLossOutput:
    """Goes through all chunks; adds their gradients, with respect to the loss, to ``gradients`` where given."""
    if job.of_sequences:
        return _run_twice(hidden, weight, job, gradients)
    projection, plan, record = job.projection, job.plan, Record(job)
    solver = ChunkSolver(projection, weight, plan)
    for chunk, chunk_hidden in projection.shard.hidden_states(hidden, plan.chunks):
        logits = solver.logits(chunk_hidden)
        softmax = solver.softmax(logits, chunk.rows, with_entropy=True)
        slopes = record.add(chunk.part, softmax)
        if gradients is not None:
            solver.logit_gradients_(logits, chunk.rows, softmax, slopes, job.entropy_slope(chunk.part))
            gradients.add(chunk, logits, chunk_hidden)
    return record.output()


def _run_twice(
    hidden: torch.Tensor, weight: torch.Tensor, job: LossJob, gradients: ProjectionGradients | None
) -> PolicyLossOutput:
    """The same where the objective must know all log-probabilities first."""
    projection, plan, record = job.projection, job.plan, Record(job)
    softmax = softmax_of(hidden, weight, projection, plan, with_entropy=True)
    everything = slice(0, job.log_mu.shape[0])
    slopes = job.everywhere(record.add(everything, softmax.at(plan.rows)))
    output = record.output()
    if gradients is not None:
        entropy_slope = job.entropy_slope(everything)
        entropy_slope = None if entropy_slope is None else job.everywhere(entropy_slope)
        add_gradients(hidden, weight, projection, plan, softmax, slopes, entropy_slope, gradients)
    return output
