"""Which tokens are multiplied, and in chunks of what size."""

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.ops.chunking import active_rows, chunk_size, chunks


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("weights", [[], [1.0], [0.0], [0.0, 2.0, 0.0, -1.0, float("nan"), 0.0, 3.0], [1.0] * 7])
def test_chunks_hold_every_active_token_once_and_in_order(weights, size):
    weights = torch.tensor(weights)
    expected = [token for token, weight in enumerate(weights.tolist()) if weight != 0]
    tokens, places = torch.arange(len(weights)), torch.arange(len(expected))
    cut = list(chunks(active_rows(weights), size))
    assert [token for _, rows in cut for token in tokens[rows].tolist()] == expected
    assert [place for part, _ in cut for place in places[part].tolist()] == list(range(len(expected)))
    assert all(0 < len(tokens[rows]) <= size for _, rows in cut)


def test_named_chunk_is_taken():
    assert chunk_size(17, 4, 1000) == 17


def test_chosen_chunk_shrinks_with_the_vocabulary_but_stays_wide_enough_for_a_product():
    sizes = [chunk_size(None, 4, vocabulary) for vocabulary in (1, 1000, 32_768, 151_936, 10**9)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 128
    assert all(size % 128 == 0 for size in sizes)
    assert chunk_size(None, 2, 32_768) == 2 * chunk_size(None, 4, 32_768)


def test_chunk_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"\(got -1\)"):
        chunk_size(-1, 4, 10)
