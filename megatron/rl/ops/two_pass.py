"""The softmax of all chunks first, their gradients later, from logits that are multiplied again.

For whatever must know log-probabilities of many tokens before it knows its derivative by any of them. The saved peak
and sum stand for the softmax, so the second pass needs no collective over the vocabulary.
"""

import torch

from megatron.rl.ops.chunking import Plan
from megatron.rl.ops.gradients import ProjectionGradients
from megatron.rl.ops.projection import ChunkSolver, Projection
from megatron.rl.ops.softmax import ChunkSoftmax


def softmax_of(
    hidden: torch.Tensor, weight: torch.Tensor, projection: Projection, plan: Plan, with_entropy: bool
) -> ChunkSoftmax:
    """The softmax of the planned tokens, at their places among all tokens; others' values are 0."""
    tokens, targets = projection.target_ids.shape
    new = hidden.new_zeros
    logprobs = new(tokens, targets, dtype=torch.float32)
    peak, sum_exp, entropy = (new(tokens, dtype=torch.float32) for _ in range(3))
    solver = ChunkSolver(projection, weight, plan)
    for chunk, chunk_hidden in projection.shard.hidden_states(hidden, plan.chunks):
        rows = chunk.rows
        softmax = solver.softmax(solver.logits(chunk_hidden), rows, with_entropy)
        logprobs[rows], peak[rows], sum_exp[rows] = softmax.logprobs, softmax.peak, softmax.sum_exp
        if softmax.entropy is not None:
            entropy[rows] = softmax.entropy
    return ChunkSoftmax(logprobs, entropy if with_entropy else None, peak, sum_exp)


def add_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    projection: Projection,
    plan: Plan,
    softmax: ChunkSoftmax,
    logprob_slopes: torch.Tensor,
    entropy_slope: torch.Tensor | None,
    gradients: ProjectionGradients,
) -> None:
    """Adds the planned tokens' gradients for a loss of the derivatives ``logprob_slopes`` and ``entropy_slope``.

    ``softmax`` and the slopes, [tokens, targets] and [tokens], hold all tokens.
    """
    solver = ChunkSolver(projection, weight, plan)
    for chunk, chunk_hidden in projection.shard.hidden_states(hidden, plan.chunks):
        rows = chunk.rows
        logits = solver.logits(chunk_hidden)
        by_entropy = None if entropy_slope is None else entropy_slope[rows]
        solver.logit_gradients_(logits, rows, softmax.at(rows), logprob_slopes[rows], by_entropy)
        gradients.add(chunk, logits, chunk_hidden)
