"""Which sequences share a micro-batch: bins of a token capacity, few and evenly filled."""

import bisect
from collections.abc import Sequence

Bin = list[int]  # places of sequences in the mini-batch


def pack(lengths: Sequence[int], capacity: int, *, step: int = 1, max_sequences: int | None = None) -> list[Bin]:
    """Sequences into as few bins as two classic heuristics find, in a multiple of ``step``, evenly filled.

    For a growing number of bins the longest sequence left goes to the emptiest bin (LPT, which balances); where that
    does not fit, to the fullest bin that has room (best fit decreasing, which at worst needs 11/9 of the bins needed).
    Deterministic; some bins are empty where there are fewer sequences than bins.

    Args:
        lengths: tokens of each sequence, padding included.
        capacity: tokens that no bin may exceed.
        step: the number of bins is a multiple of it.
        max_sequences: most sequences of a bin.

    Raises ValueError for a sequence longer than ``capacity``.
    """
    for place, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"sequence {place} has {length} tokens, more than a micro-batch's {capacity}")
    limit = max_sequences or max(1, len(lengths))
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    least = max(-(-sum(lengths) // capacity), -(-len(lengths) // limit), 1)
    count = -(-least // step) * step
    while True:
        for emptiest_first in (True, False):
            bins = _fill(lengths, order, count, capacity, limit, emptiest_first)
            if bins is not None:
                return bins
        count += step


def _fill(
    lengths: Sequence[int], order: Sequence[int], count: int, capacity: int, limit: int, emptiest_first: bool
) -> list[Bin] | None:
    """``count`` bins, or None where the sequences do not fit in this order."""
    bins: list[Bin] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # sorted; full ones in number of sequences are taken out
    for place in order:
        room = bisect.bisect_right(loads, (capacity - lengths[place], count))
        if room == 0:
            return None
        load, number = loads.pop(0 if emptiest_first else room - 1)
        bins[number].append(place)
        if len(bins[number]) < limit:
            bisect.insort(loads, (load + lengths[place], number))
    return bins


def group_rows(lengths: Sequence[int], capacity: int, *, step: int = 1) -> list[Bin]:
    """Rows that are padded to the longest of their bin: neighbours by length, no bin above ``capacity`` tokens.

    Takes the fewest bins that sequences sorted by length allow, then halves the largest ones until their number is a
    multiple of ``step``. Deterministic; raises ValueError for a row longer than ``capacity``.
    """
    bins: list[Bin] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if lengths[place] > capacity:
            raise ValueError(f"sequence {place} has {lengths[place]} tokens, more than a micro-batch's {capacity}")
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= capacity:
            bins[-1].append(place)
        else:
            bins.append([place])
    while len(bins) % step or not bins:
        number = max(range(len(bins)), key=lambda number: len(bins[number]), default=None)
        if number is None or len(bins[number]) < 2:
            bins.append([])
        else:
            half = len(bins[number]) // 2
            bins[number : number + 1] = [bins[number][:half], bins[number][half:]]
    return bins


def deal(loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Bins to data-parallel ranks, equally many each: the numbers of each rank's bins, by their ``loads`` in tokens.

    In turns from the fullest to the emptiest, every second turn backwards: the ranks' sums are close, and bins that
    run at the same time on different ranks are alike. The number of bins must be a multiple of ``ranks``.
    """
    order = sorted(range(len(loads)), key=lambda number: (-loads[number], number))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for turn in range(len(loads) // ranks):
        mine = order[turn * ranks : (turn + 1) * ranks]
        for rank, number in enumerate(mine if turn % 2 == 0 else reversed(mine)):
            shares[rank].append(number)
    return shares
