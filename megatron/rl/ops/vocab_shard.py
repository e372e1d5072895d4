"""The vocabulary's split over a tensor-parallel group, and what its ranks tell each other."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.rl.errors import ConfigError
from megatron.rl.ops.chunking import Chunk, Exchange
from megatron.rl.ops.collectives import all_gather, finish


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the output weight that stand for tokens; rows of padding are not among them."""

    start: int  # token id of the first row
    rows: int  # true rows here: the weight's first ``rows``; 0 on a rank that holds padding only
    group: dist.ProcessGroup | None  # None: the vocabulary is not split

    @classmethod
    def of(cls, weight: torch.Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> "VocabShard":
        """The shard of rank r, rows [r * n, (r + 1) * n) of the padded vocabulary for a weight of n rows.

        Raises ConfigError where ``vocab_size`` is not in 1 .. ranks * n.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        local = weight.shape[0]
        if not 0 < vocab_size <= size * local:
            raise ConfigError(f"vocab_size must be between 1 and the weight's {size * local} rows (got {vocab_size})")
        start = rank * local
        return cls(start, min(max(vocab_size - start, 0), local), group if size > 1 else None)

    @property
    def size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None else self.group.rank()

    def gather(self, per_rank: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, stacked: [...] -> [ranks, ...]."""
        if self.group is None:
            return per_rank.unsqueeze(0)
        everyone = per_rank.new_empty((self.size, *per_rank.shape))
        all_gather(everyone, per_rank.contiguous(), self.group)
        return everyone

    def hidden_states(self, hidden: torch.Tensor, chunks: list[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Each chunk with its tokens' hidden states, [n, hidden_size].

        Where each rank holds its own tokens' alone, the next chunk's are gathered while this one is worked on.
        """
        waiting: _Gathering | None = None
        for index, chunk in enumerate(chunks):
            if chunk.exchange is None:
                yield chunk, hidden[chunk.rows]
                continue
            states = (waiting or _Gathering(hidden, chunk.exchange, self)).wait()
            following = chunks[index + 1].exchange if index + 1 < len(chunks) else None
            waiting = None if following is None else _Gathering(hidden, following, self)
            yield chunk, states


class _Gathering:
    """A chunk's hidden states on their way from the ranks that hold them."""

    def __init__(self, hidden: torch.Tensor, exchange: Exchange, shard: VocabShard):
        sent = hidden.new_zeros(exchange.width, hidden.shape[1])
        sent[: exchange.own.shape[0]] = hidden[exchange.own]
        self._sent = sent  # kept alive until it has arrived
        self._received = hidden.new_empty(shard.size * exchange.width, hidden.shape[1])
        self._places = exchange.places
        self._work = dist.all_gather_into_tensor(self._received, sent, group=shard.group, async_op=True)

    def wait(self) -> torch.Tensor:
        finish(self._work, self._sent, self._received)
        return self._received if self._places is None else self._received[self._places]
