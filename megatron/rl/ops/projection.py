"""One call's output projection: what every chunk of its tokens is multiplied with and compared to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.rl.ops.buffers import large_buffer
from megatron.rl.ops.chunking import Plan, Rows, chunk_size, plan_chunks, plan_shared_chunks
from megatron.rl.ops.elementwise import passes_for
from megatron.rl.ops.softmax import ChunkSoftmax, ChunkTargets, chunk_softmax, logit_gradients_
from megatron.rl.ops.validation import check_shapes, inverse_temperature
from megatron.rl.ops.vocab_shard import VocabShard


@dataclass(frozen=True)
class Projection:
    """The arguments that both ops share, checked."""

    shard: VocabShard
    target_ids: torch.Tensor  # [tokens, targets] int64; a negative id is no target
    inverse_temperature: torch.Tensor | None  # [tokens] float32; None for a temperature of 1
    sequence_parallel: bool  # hidden is this rank's slice of the tokens
    vocab_size: int  # of all ranks together, without padding
    chunk: int  # tokens multiplied at a time

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        *,
        vocab_size: int,
        temperature: float | torch.Tensor,
        tp_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        token_chunk: int | None,
        per_token: dict[str, torch.Tensor],
    ) -> "Projection":
        """Raises what the ops document; ``per_token`` names further inputs of one value for each token."""
        ranks = tp_group.size() if tp_group is not None and sequence_parallel else 1
        tokens = hidden.shape[0] * ranks
        check_shapes(hidden, weight, {"target_ids": target_ids} | per_token, tokens)
        return cls(
            shard=VocabShard.of(weight, vocab_size, tp_group),
            target_ids=target_ids.long().unsqueeze(1),
            inverse_temperature=inverse_temperature(temperature, tokens, hidden.device),
            sequence_parallel=sequence_parallel,
            vocab_size=vocab_size,
            chunk=chunk_size(token_chunk, weight),
        )

    @property
    def tokens(self) -> int:
        """Of all ranks."""
        return self.target_ids.shape[0]

    def plan(self, rows: Rows) -> Plan:
        """Chunks that hold the tokens ``rows``."""
        if self.shard.group is None or not self.sequence_parallel:
            return plan_chunks(rows, self.chunk)
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop, device=self.target_ids.device)
        ranks = self.shard.size
        return plan_shared_chunks(rows, self.chunk, self.tokens // ranks, ranks, self.shard.rank)

    def true_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight's rows that stand for tokens, [columns, hidden_size]."""
        return weight[: self.shard.rows]

    def bad_targets(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """([n] bool where a token's first target is outside the vocabulary, [n] the targets)."""
        targets = self.target_ids[rows][:, 0]
        return (targets < 0) | (targets >= self.vocab_size), targets


class ChunkSolver:
    """Logits, softmax and logit gradients of one chunk after the other, in memory that all of them share."""

    def __init__(self, projection: Projection, weight: torch.Tensor, plan: Plan):
        self._projection = projection
        self._weight = projection.true_rows(weight)
        self._logits = large_buffer((plan.widest, projection.shard.rows), weight.dtype, weight.device)
        self._passes = passes_for(self._logits.numel(), weight.device, weight.dtype)

    def logits(self, chunk_hidden: torch.Tensor) -> torch.Tensor:
        """A chunk's logits before the temperature, [n, columns], in the inputs' type. The next call overwrites them."""
        return torch.mm(chunk_hidden, self._weight.t(), out=self._logits[: chunk_hidden.shape[0]])

    def softmax(self, logits: torch.Tensor, rows: Rows, with_entropy: bool) -> ChunkSoftmax:
        """The softmax of a chunk's logits [n, columns] over the whole vocabulary. One collective."""
        shard = self._projection.shard
        return chunk_softmax(self._passes, logits, self._targets(rows), self._inverse(rows), shard, with_entropy)

    def logit_gradients_(
        self,
        logits: torch.Tensor,
        rows: Rows,
        softmax: ChunkSoftmax,
        logprob_slopes: torch.Tensor,
        entropy_slope: torch.Tensor | None,
    ) -> torch.Tensor:
        """Overwrites a chunk's logits by the loss's derivative with respect to them. No collective."""
        targets, inverse = self._targets(rows), self._inverse(rows)
        return logit_gradients_(self._passes, logits, softmax, targets, inverse, logprob_slopes, entropy_slope)

    def _targets(self, rows: Rows) -> ChunkTargets:
        return ChunkTargets.of(self._projection.target_ids[rows], self._projection.shard)

    def _inverse(self, rows: Rows) -> torch.Tensor | None:
        inverse = self._projection.inverse_temperature
        return None if inverse is None else inverse[rows]
