import math
import random
from dataclasses import replace

import pytest

from megatron.rl.config import BatchingConfig
from megatron.rl.data import Cut, cut

ROWS = BatchingConfig(micro_batch_size=4)
TOKENS = BatchingConfig(micro_batch_size=1, token_budget=96)
PACKED = replace(TOKENS, packed=True)
LENGTHS = [random.Random(i).randint(1, 60) for i in range(37)]  # primes


def everything(shares: list[list[Cut]]) -> list[Cut]:
    return [cut for share in shares for cut in share]


@pytest.mark.parametrize("config", [ROWS, TOKENS, PACKED], ids=["rows", "tokens", "packed"])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 37])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count_multiple", [1, 2])
def test_every_way_to_cut(config, uniform, count, ranks, count_multiple):
    """ms-swift PR #8102: a rank without samples hung, since it did fewer passes than the others."""
    config = replace(config, uniform=uniform, count_multiple=count_multiple, sequence_multiple=4, total_multiple=8)
    lengths = LENGTHS[:count]
    shares = cut(lengths, ranks, config)
    assert len({len(share) for share in shares}) == 1 and len(shares) == ranks
    assert len(shares[0]) >= 1 and len(shares[0]) % count_multiple == 0
    cuts = everything(shares)
    assert sorted(place for cut in cuts for place in cut.places) == list(range(count))
    for found in cuts:
        assert found.length % 8 == 0 and found.length > 0
        if config.token_budget is not None:
            assert found.tokens <= config.token_budget
        if found.packed is None:
            assert found.rows >= max(1, len(found.places))
            assert all(lengths[place] <= found.length for place in found.places)
        else:
            assert found.rows == 1 and sum(found.packed) == found.length
            assert len(found.packed) - len(found.places) in (0, 1)  # the padding
            for place, length in zip(found.places, found.packed, strict=False):
                assert length % 4 == 0 and 0 <= length - lengths[place] < 4
    if uniform or config.token_budget is None:
        assert len({(found.rows, found.length) for found in cuts}) == 1
    if config.token_budget is not None and not uniform:  # the same everywhere, whoever asks
        assert shares == cut(lengths, ranks, config)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 16, 17])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_are_dealt_in_turn(count, ranks, rows):
    shares = cut([5] * count, ranks, BatchingConfig(rows))
    assert len(shares[0]) == max(1, math.ceil(math.ceil(count / ranks) / rows))
    sizes = [sum(len(found.places) for found in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert {found.rows for found in everything(shares)} == {rows}


def test_packing_leaves_little_padding_and_few_micro_batches():
    packed, rows = (everything(cut(LENGTHS, 2, config)) for config in (PACKED, replace(TOKENS, total_multiple=1)))
    assert sum(found.tokens for found in packed) == sum(LENGTHS)
    assert sum(found.tokens for found in rows) < 1.25 * sum(LENGTHS)  # neighbours by length share a micro-batch
    assert len(packed) == 2 * math.ceil(sum(LENGTHS) / 96 / 2)


@pytest.mark.parametrize("multiple", [16, 32, 128])
def test_lengths_are_aligned_for_fp8(multiple):
    """NeMo-RL PR #1884: packed lengths must be aligned, by recipe to 16, 32 or 128 tokens."""
    for config in (ROWS, replace(TOKENS, token_budget=500), replace(PACKED, token_budget=500)):
        cuts = everything(cut(LENGTHS, 2, replace(config, total_multiple=multiple)))
        assert all(found.length % multiple == 0 for found in cuts)
        assert all(found.tokens <= 500 for found in cuts if config.token_budget)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_above_the_budget_is_refused(packed, uniform):
    config = BatchingConfig(1, token_budget=31, packed=packed, uniform=uniform, sequence_multiple=8, total_multiple=8)
    with pytest.raises(ValueError, match="32 tokens does not fit in a micro-batch of 24"):
        cut([3, 25], 1, config)


@pytest.mark.parametrize(("ranks", "rows"), [(0, 1), (1, 0)])
def test_impossible_shares_are_refused(ranks, rows):
    with pytest.raises(ValueError, match="data-parallel ranks with micro-batches of"):
        cut([5], ranks, BatchingConfig(rows))
