"""How a mini-batch is cut into micro-batches: by rows, by a token budget, or packed into one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.rl.config import BatchingConfig
from megatron.rl.data.packing import deal, group_rows, pack


@dataclass(frozen=True)
class Cut:
    """The shape of one micro-batch, context-parallel ranks together, and whose responses it holds."""

    places: tuple[int, ...]  # of its responses in the mini-batch, in the order of rows or of the pack
    rows: int  # at least len(places) unless packed; further ones are padding
    length: int  # tokens of a row
    packed: tuple[int, ...] | None = None  # tokens of each packed sequence; a last one without a response is padding

    @property
    def tokens(self) -> int:
        """Positions in all."""
        return self.rows * self.length


def cut(lengths: Sequence[int], ranks: int, config: BatchingConfig) -> list[list[Cut]]:
    """The micro-batches of each data-parallel rank: equally many on every rank, a multiple of ``count_multiple``.

    ``lengths`` are the tokens of each sequence of the mini-batch, prompt and response. Every sequence is in one
    micro-batch; a rank without any still has micro-batches of padding, since it takes part in all forward and backward
    passes and collectives. No micro-batch is above ``token_budget``, where there is one.
    """
    if ranks < 1 or config.micro_batch_size < 1:
        raise ValueError(f"{ranks} data-parallel ranks with micro-batches of {config.micro_batch_size} rows")
    if config.packed:
        return _packed(lengths, ranks, config)
    padded = [_up(length, config.total_multiple) for length in lengths]
    longest = max(padded, default=config.total_multiple)
    if config.token_budget is None:
        return _by_rows(len(padded), ranks, config.micro_batch_size, longest, config.count_multiple)
    if config.uniform:
        rows = min(_budget(config, longest) // longest, max(1, math.ceil(len(padded) / ranks)))
        return _by_rows(len(padded), ranks, rows, longest, config.count_multiple)
    bins = group_rows(padded, _budget(config, longest), step=ranks * config.count_multiple)
    cuts = [
        Cut(tuple(places), max(1, len(places)), padded[places[0]] if places else config.total_multiple)
        for places in bins
    ]
    return _dealt(cuts, ranks)


def _dealt(cuts: Sequence[Cut], ranks: int) -> list[list[Cut]]:
    return [[cuts[number] for number in share] for share in deal([cut.tokens for cut in cuts], ranks)]


def _by_rows(count: int, ranks: int, rows: int, length: int, count_multiple: int) -> list[list[Cut]]:
    """All of one shape. Sequences are dealt in turn, so ranks differ by one at most."""
    largest_share = math.ceil(count / ranks)
    micro_batches = _up(max(1, math.ceil(largest_share / rows)), count_multiple)
    shares = [range(rank, count, ranks) for rank in range(ranks)]
    return [
        [Cut(tuple(share[start : start + rows]), rows, length) for start in range(0, micro_batches * rows, rows)]
        for share in shares
    ]


def _packed(lengths: Sequence[int], ranks: int, config: BatchingConfig) -> list[list[Cut]]:
    padded = [_up(length, config.sequence_multiple) for length in lengths]
    capacity = _budget(config, max(padded, default=1))
    step = ranks * config.count_multiple
    bins = pack(padded, capacity, step=step, max_sequences=config.max_sequences_per_bin)
    used = [sum(padded[place] for place in places) for places in bins]
    totals = [_up(max(1, tokens), config.total_multiple) for tokens in used]
    if config.uniform:
        totals = [max(totals)] * len(totals)
    cuts = []
    for places, tokens, total in zip(bins, used, totals, strict=True):
        filling = (total - tokens,) if total > tokens else ()
        cuts.append(Cut(tuple(places), 1, total, (*(padded[place] for place in places), *filling)))
    return _dealt(cuts, ranks)


def _budget(config: BatchingConfig, longest: int) -> int:
    """The token budget, lowered so far that rounding a micro-batch's tokens up cannot exceed it."""
    if config.token_budget is None:
        raise ValueError("packing needs a token budget")
    budget = config.token_budget // config.total_multiple * config.total_multiple
    if longest > budget:
        raise ValueError(f"a sequence of {longest} tokens does not fit in a micro-batch of {budget} tokens")
    return budget


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
