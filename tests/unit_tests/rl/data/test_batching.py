import dataclasses
import math

import pytest
import torch

from megatron.rl.data import collate, padded_length, split_for_rank
from tests.unit_tests.rl.data.samples import make_sample

PAD = 999


def test_planted_values_come_back_at_the_positions_that_predict_them():
    """ms-swift PR #8427 shifted log-probabilities by one."""
    batch = collate([make_sample(3, 4, advantage=-2.5, first_id=10)], 9, PAD)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 15, 16, PAD, PAD]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, 15, 16, PAD, PAD, PAD]]
    # Position 2, the last prompt token, predicts the first response token, 13.
    assert batch.mask.tolist() == [[False, False, True, True, True, True, False, False, False]]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -1 / 8, -2 / 8, -3 / 8, -4 / 8, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, -2.5, -2.5, -2.5, -2.5, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(9))]
    assert batch.response_tokens.tolist() == [4]


def test_every_row_keeps_its_own_values():
    samples = [
        make_sample(p, r, advantage=p - r, first_id=100 * i) for i, (p, r) in enumerate([(1, 1), (5, 2), (2, 7)])
    ]
    batch = collate(samples, 11, PAD)
    for row, sample in enumerate(samples):
        on = batch.mask[row]
        assert tuple(batch.targets[row][on].tolist()) == sample.completion.token_ids
        assert tuple(batch.behavior_logprobs[row][on].tolist()) == sample.completion.logprobs
        assert set(batch.advantages[row][on].tolist()) == {sample.advantage}
        assert not batch.behavior_logprobs[row][~on].any()
        assert not batch.advantages[row][~on].any()
    dtypes = {name: tensor.dtype for name, tensor in vars(batch).items()}
    assert dtypes == {
        "tokens": torch.int64,
        "position_ids": torch.int64,
        "targets": torch.int64,
        "mask": torch.bool,
        "behavior_logprobs": torch.float32,
        "advantages": torch.float32,
        "response_tokens": torch.int64,
    }


def test_masks_go_by_position_when_padding_is_the_end_of_sequence_token():
    """Megatron-Bridge PR #4660: with pad id = eos id the real eos was masked."""
    sample = make_sample(2, 3, first_id=10)
    eos = sample.completion.token_ids[-1]
    batch = collate([sample], 8, pad_id=eos)
    assert batch.mask.tolist() == [[False, True, True, True, False, False, False, False]]
    assert batch.targets[batch.mask].tolist() == [12, 13, eos]


def test_a_row_that_fills_its_length_has_no_padding():
    batch = collate([make_sample(2, 3, first_id=10)], 5, PAD)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14]]
    assert batch.mask.tolist() == [[False, True, True, True, False]]


def test_one_token_and_no_token_and_no_sample():
    batch = collate([make_sample(1, 1, first_id=10), make_sample(1, 0, first_id=20), None], 3, PAD)
    assert batch.mask.tolist() == [[True, False, False], [False] * 3, [False] * 3]
    assert batch.tokens.tolist() == [[10, 11, PAD], [20, PAD, PAD], [PAD] * 3]
    assert batch.response_tokens.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (make_sample(0, 2), "no prompt token"),
        (make_sample(3, 6), "9 tokens, more than a row's 8"),
        (
            dataclasses.replace(
                make_sample(2, 2),
                completion=dataclasses.replace(make_sample(2, 2).completion, logprobs=(0.0,)),
            ),
            "2 tokens but 1 log-probabilities",
        ),
    ],
)
def test_impossible_rows_are_refused(sample, message):
    with pytest.raises(ValueError, match=message):
        collate([sample], 8, PAD)


@pytest.mark.parametrize(("multiple", "expected"), [(1, 7), (2, 8), (7, 7), (16, 16), (128, 128)])
def test_padded_length(multiple, expected):
    assert padded_length([make_sample(3, 4), make_sample(1, 1)], multiple) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 5, 7, 8, 16, 17])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_ranks_get_all_samples_once_in_equally_many_micro_batches_of_one_size(count, dp_size, micro):
    """ms-swift PR #8102: a rank without samples hung, since it did fewer passes than the others."""
    samples = [make_sample(name=str(i)) for i in range(count)]
    ranks = [split_for_rank(samples, rank, dp_size, micro) for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == max(1, math.ceil(math.ceil(count / dp_size) / micro))
    assert {len(rows) for batches in ranks for rows in batches} == {micro}
    shares = [[row for rows in batches for row in rows if row is not None] for batches in ranks]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    names = [sample.completion.request_id for share in shares for sample in share]
    assert sorted(names, key=int) == [str(i) for i in range(count)]


@pytest.mark.parametrize(("rank", "size", "micro"), [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_impossible_shares_are_refused(rank, size, micro):
    with pytest.raises(ValueError, match="data-parallel rank|micro_batch_size"):
        split_for_rank([make_sample()], rank, size, micro)
