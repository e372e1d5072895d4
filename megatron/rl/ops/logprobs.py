"""Log-probabilities of an output projection, differentiable, without the logits of the batch."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.ops.chunking import Rows, active_rows
from megatron.rl.ops.gradients import ProjectionGradients
from megatron.rl.ops.projection import Projection
from megatron.rl.ops.softmax import ChunkSoftmax
from megatron.rl.ops.two_pass import add_gradients, softmax_of
from megatron.rl.ops.validation import check_tokens


@dataclass(frozen=True)
class LogprobOutput:
    """Per token, [tokens], float32."""

    logprobs: torch.Tensor  # log pi of the target, nats, at most 0, with gradient
    entropy: torch.Tensor | None  # of pi over the whole vocabulary, nats, with gradient; None if not asked for
    logsumexp: torch.Tensor  # of the logits at the temperature, nats, detached


def fused_linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float | torch.Tensor = 1.0,
    return_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    token_chunk: int | None = None,
) -> LogprobOutput:
    """Log-probabilities of ``target_ids`` under softmax(hidden weight^T / temperature), and entropies on request.

    One matrix product forward. The backward pass multiplies a chunk's logits again, from the softmax's saved peak and
    sum, so that it needs no collective over the vocabulary; tokens whose incoming gradient is zero are left out.
    The incoming gradients must be equal on all ranks of ``tp_group``.

    Args:
        hidden: [tokens, hidden_size] float32 or bfloat16; with ``sequence_parallel`` this rank's slice,
            [tokens / ranks, hidden_size].
        weight: [padded local vocabulary, hidden_size], of the same type. Rank r of the group holds the rows of
            tokens [r * n, (r + 1) * n); rows from ``vocab_size`` on are padding and enter nothing. A weight with a
            ``main_grad`` gets its gradient added there, by megatron-core's convention.
        target_ids: [tokens] integers.
        vocab_size: true size of the vocabulary, over all ranks.
        temperature: of sampling; logits are divided by it. A number, or one for each token.
        return_entropy: also give entropies.
        tp_group: the ranks that share the vocabulary; None for one.
        token_chunk: tokens multiplied at a time; None chooses.

    Raises:
        ConfigError: a vocabulary size, temperature or chunk that cannot be.
        TokenError: a target outside the vocabulary; the message and ``token`` give its position.
        ValueError: shapes or types that do not fit together.
    """
    projection = Projection.of(
        hidden,
        weight,
        target_ids,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        token_chunk=token_chunk,
        per_token={},
    )
    everything: Rows = slice(0, projection.tokens)
    rule = f"a target must be in the vocabulary, from 0 to {vocab_size - 1}"
    check_tokens({rule: projection.bad_targets(everything)}, everything)
    logprobs, entropy, logsumexp = _Logprobs.apply(hidden, weight, projection, return_entropy)
    return LogprobOutput(logprobs, entropy, logsumexp)


class _Logprobs(torch.autograd.Function):
    """Two passes: the softmax forward, its gradient backward from logits multiplied again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, projection: Projection, with_entropy: bool
    ) -> tuple[torch.Tensor | None, ...]:
        plan = projection.plan(slice(0, projection.tokens))
        softmax = softmax_of(hidden, weight, projection, plan, with_entropy)
        logprobs, logsumexp = softmax.logprobs.squeeze(1), softmax.logsumexp
        ctx.projection = projection
        ctx.save_for_backward(hidden, weight, *softmax)
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return logprobs, softmax.entropy, logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None, *unused: Any
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, *saved = ctx.saved_tensors
        softmax = ChunkSoftmax(*saved)
        projection: Projection = ctx.projection
        slope = torch.zeros_like(softmax.peak) if grad_logprobs is None else grad_logprobs
        relevant = slope != 0 if grad_entropy is None else (slope != 0) | (grad_entropy != 0)
        plan = projection.plan(active_rows(relevant))
        gradients = ProjectionGradients(hidden, weight, projection, plan, needed=ctx.needs_input_grad[:2], final=True)
        add_gradients(hidden, weight, projection, plan, softmax, slope.unsqueeze(1), grad_entropy, gradients)
        return *gradients.deliver(None), None, None
