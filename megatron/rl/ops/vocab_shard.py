"""The vocabulary's split over a tensor-parallel group, and the one collective that a chunk of tokens needs."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.rl.errors import ConfigError


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
        dist.all_gather_into_tensor(everyone.flatten(0, 1), per_rank.contiguous(), group=self.group)
        return everyone

    def gather_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens' hidden states from each rank's slice: [tokens / ranks, hidden_size] -> [tokens, hidden_size]."""
        if self.group is None or hidden.numel() == 0:
            return hidden
        return self.gather(hidden).flatten(0, 1)
