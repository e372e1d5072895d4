import math
import random

import pytest

from megatron.rl.data.packing import deal, group_rows, pack


def lengths_like_responses(count: int, seed: int) -> list[int]:
    """A long tail, as responses have."""
    rng = random.Random(seed)
    return [min(4096, int(rng.lognormvariate(6, 1)) + 1) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [0, 1, 7, 64, 509])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_packs_hold_every_sequence_once_and_never_exceed_the_capacity(count, seed, step):
    """slime #1951 was a micro-batch of 205k tokens."""
    lengths = lengths_like_responses(count, seed)
    bins = pack(lengths, 8192, step=step)
    assert len(bins) % step == 0 and bins
    assert sorted(place for places in bins for place in places) == list(range(count))
    assert max(sum(lengths[place] for place in places) for places in bins) <= 8192
    assert bins == pack(lengths, 8192, step=step)


@pytest.mark.parametrize("seed", range(10))
def test_packs_are_few_and_even(seed):
    lengths = lengths_like_responses(512, seed)
    bins = pack(lengths, 8192)
    needed = math.ceil(sum(lengths) / 8192)
    loads = [sum(lengths[place] for place in places) for places in bins]
    assert len(bins) <= needed + 1
    assert max(loads) - min(loads) <= 0.05 * 8192


def test_best_fit_serves_where_balancing_fails():
    """The emptiest bin first would leave 3 + 2 twice, and no room for the last one."""
    lengths = [3, 3, 2, 2, 2]
    assert sorted(sorted(lengths[place] for place in places) for places in pack(lengths, 6)) == [[2, 2, 2], [3, 3]]


def test_sequences_of_a_pack_are_limited():
    bins = pack([1] * 10, 100, max_sequences=3)
    assert max(map(len, bins)) == 3 and len(bins) == 4


def test_a_sequence_above_the_capacity_is_refused():
    for function in (pack, group_rows):
        with pytest.raises(ValueError, match="sequence 1 has 9 tokens, more than a micro-batch's 8"):
            function([3, 9], 8)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 509])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_rows_are_grouped_with_their_neighbours_within_the_capacity(count, step):
    lengths = lengths_like_responses(count, count)
    bins = group_rows(lengths, 8192, step=step)
    assert len(bins) % step == 0 and bins
    assert sorted(place for places in bins for place in places) == list(range(count))
    for places in bins:
        assert len(places) * max((lengths[place] for place in places), default=0) <= 8192
    ends = sorted(sorted(lengths[place] for place in places) for places in bins if places)
    assert all(shorter[-1] <= longer[0] for shorter, longer in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_are_dealt_equally_many_bins_of_near_equal_load(ranks):
    loads = [random.Random(i).randint(4000, 8192) for i in range(ranks * 6)]
    shares = deal(loads, ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(loads)))
    assert {len(share) for share in shares} == {6}
    sums = [sum(loads[number] for number in share) for share in shares]
    assert max(sums) - min(sums) <= 0.02 * sum(sums)
