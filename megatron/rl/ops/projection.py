"""One call's output projection: what every chunk of its tokens is multiplied with and compared to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.rl.ops.chunking import Rows, chunk_size
from megatron.rl.ops.softmax import ChunkSoftmax, ChunkTargets, chunk_softmax, logit_gradients_
from megatron.rl.ops.validation import check_shapes, inverse_temperature
from megatron.rl.ops.vocab_shard import VocabShard


@dataclass(frozen=True)
class Projection:
    """The arguments that both ops share, checked."""

    shard: VocabShard
    target_ids: torch.Tensor  # [tokens] int64
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
            target_ids=target_ids.long(),
            inverse_temperature=inverse_temperature(temperature, tokens, hidden.device),
            sequence_parallel=sequence_parallel,
            vocab_size=vocab_size,
            chunk=chunk_size(token_chunk, weight.element_size(), weight.shape[0]),
        )

    def all_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of all tokens, [tokens, hidden_size]."""
        return self.shard.gather_tokens(hidden) if self.sequence_parallel else hidden

    def true_rows(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight's rows that stand for tokens, [columns, hidden_size]."""
        return weight[: self.shard.rows]

    def workspace(self, weight: torch.Tensor, tokens: int) -> torch.Tensor:
        """Memory for one chunk's logits, which all chunks out of ``tokens`` share."""
        return weight.new_empty(min(self.chunk, tokens), self.shard.rows)

    def logits(self, chunk_hidden: torch.Tensor, weight: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        """A chunk's logits before the temperature, [n, columns], in ``workspace``; the type is the inputs'."""
        return torch.mm(chunk_hidden, self.true_rows(weight).t(), out=workspace[: chunk_hidden.shape[0]])

    def bad_targets(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """([n] bool where a target is outside the vocabulary, [n] the targets)."""
        targets = self.target_ids[rows]
        return (targets < 0) | (targets >= self.vocab_size), targets

    def softmax(self, logits: torch.Tensor, rows: Rows, with_entropy: bool) -> ChunkSoftmax:
        """The softmax of a chunk's logits [n, columns] over the whole vocabulary. One collective."""
        return chunk_softmax(logits, self._targets(rows), self._inverse(rows), self.shard, with_entropy)

    def logit_gradients_(
        self,
        logits: torch.Tensor,
        rows: Rows,
        softmax: ChunkSoftmax,
        logprob_slope: torch.Tensor,
        entropy_slope: torch.Tensor | None,
    ) -> torch.Tensor:
        """Overwrites a chunk's logits by the loss's derivative with respect to them. No collective."""
        return logit_gradients_(logits, softmax, self._targets(rows), self._inverse(rows), logprob_slope, entropy_slope)

    def _targets(self, rows: Rows) -> ChunkTargets:
        return ChunkTargets.of(self.target_ids[rows], self.shard)

    def _inverse(self, rows: Rows) -> torch.Tensor | None:
        return None if self.inverse_temperature is None else self.inverse_temperature[rows]
