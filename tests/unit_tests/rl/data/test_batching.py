import dataclasses

import pytest
import torch

from megatron.rl.config import BatchingConfig
from megatron.rl.data import Cut, MicroBatcher, TokenBatch, collate, context_share
from megatron.rl.types import Sample
from tests.unit_tests.rl.data.samples import make_sample

PAD = 999


def padded(samples: list[Sample], length: int, rows: int | None = None, pad_id: int = PAD) -> TokenBatch:
    return collate(samples, Cut(tuple(range(len(samples))), rows or len(samples), length), pad_id)


def test_planted_values_come_back_at_the_positions_that_predict_them():
    """ms-swift PR #8427 shifted log-probabilities by one."""
    batch = padded([make_sample(3, 4, advantage=-2.5, first_id=10)], 9)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 15, 16, PAD, PAD]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, 15, 16, PAD, PAD, PAD]]
    # Position 2, the last prompt token, predicts the first response token, 13.
    assert batch.mask.tolist() == [[False, False, True, True, True, True, False, False, False]]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -1 / 8, -2 / 8, -3 / 8, -4 / 8, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, -2.5, -2.5, -2.5, -2.5, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(9))]
    assert batch.response_tokens.tolist() == [4]
    assert batch.is_padding.tolist() == [[False] * 7 + [True] * 2]
    assert batch.cu_seqlens is None


def test_every_row_keeps_its_own_values():
    samples = [
        make_sample(p, r, advantage=p - r, first_id=100 * i) for i, (p, r) in enumerate([(1, 1), (5, 2), (2, 7)])
    ]
    batch = padded(samples, 11)
    for row, sample in enumerate(samples):
        on = batch.mask[row]
        assert tuple(batch.targets[row][on].tolist()) == sample.completion.token_ids
        assert tuple(batch.behavior_logprobs[row][on].tolist()) == sample.completion.logprobs
        assert set(batch.advantages[row][on].tolist()) == {sample.advantage}
        assert not batch.behavior_logprobs[row][~on].any()
        assert not batch.advantages[row][~on].any()
        assert set(batch.sequence_ids[row].tolist()) == {row}
    dtypes = {name: value.dtype for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    assert dtypes == {
        "tokens": torch.int64,
        "position_ids": torch.int64,
        "targets": torch.int64,
        "mask": torch.bool,
        "behavior_logprobs": torch.float32,
        "advantages": torch.float32,
        "sequence_ids": torch.int64,
        "is_padding": torch.bool,
        "response_tokens": torch.int64,
    }


def test_packed_sequences_restart_their_positions_and_never_predict_across_a_bound():
    samples = [make_sample(2, 2, advantage=1.0, first_id=10), make_sample(1, 1, advantage=-1.0, first_id=50)]
    batch = collate(samples, Cut((1, 0), 1, 9, packed=(2, 5, 2)), PAD)
    assert batch.tokens.tolist() == [[50, 51, 10, 11, 12, 13, PAD, PAD, PAD]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4, 0, 1]]
    assert batch.targets.tolist() == [[51, PAD, 11, 12, 13, PAD, PAD, PAD, PAD]]
    assert batch.mask.tolist() == [[True, False, False, True, True, False, False, False, False]]
    assert batch.advantages.tolist() == [[-1, 0, 0, 1, 1, 0, 0, 0, 0]]
    assert batch.behavior_logprobs.tolist() == [[-1 / 8, 0, 0, -1 / 8, -2 / 8, 0, 0, 0, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 1, 1, 1, 1, 1, -1, -1]]
    assert batch.is_padding.tolist() == [[False] * 6 + [True] * 3]
    assert batch.response_tokens.tolist() == [1, 2]
    assert batch.places == (1, 0)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens.tolist() == [0, 2, 7, 9]


def test_masks_go_by_position_when_padding_is_the_end_of_sequence_token():
    """Megatron-Bridge PR #4660: with pad id = eos id the real eos was masked."""
    sample = make_sample(2, 3, first_id=10)
    eos = sample.completion.token_ids[-1]
    packed = collate([sample], Cut((0,), 1, 8, packed=(5, 3)), eos)
    for batch in (padded([sample], 8, pad_id=eos), packed):
        assert batch.mask.tolist() == [[False, True, True, True, False, False, False, False]]
        assert batch.targets[batch.mask].tolist() == [12, 13, eos]


def test_a_row_that_fills_its_length_has_no_padding():
    batch = padded([make_sample(2, 3, first_id=10)], 5)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14]]
    assert batch.mask.tolist() == [[False, True, True, True, False]]


def test_one_token_and_no_token_and_no_sample():
    batch = padded([make_sample(1, 1, first_id=10), make_sample(1, 0, first_id=20)], 3, rows=3)
    assert batch.mask.tolist() == [[True, False, False], [False] * 3, [False] * 3]
    assert batch.tokens.tolist() == [[10, 11, PAD], [20, PAD, PAD], [PAD] * 3]
    assert batch.sequence_ids.tolist() == [[0] * 3, [1] * 3, [-1] * 3]
    assert batch.response_tokens.tolist() == [1, 0]
    nothing = collate([], Cut((), 1, 4, packed=(4,)), PAD)
    assert nothing.tokens.tolist() == [[PAD] * 4] and not nothing.mask.any()
    assert nothing.response_tokens.shape == (0,)


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
        padded([sample], 8)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("packed", [None, (12, 24, 36, 12)])
def test_context_shares_are_two_chunks_of_each_sequence(ranks, packed):
    samples = [make_sample(4, 8, first_id=0), make_sample(9, 15, first_id=100), make_sample(2, 33, first_id=200)]
    shape = Cut((0, 1, 2), 1, 84, packed=packed) if packed else Cut((0, 1, 2), 3, 36)
    whole = collate(samples, shape, PAD)
    shares = [context_share(whole, rank, ranks) for rank in range(ranks)]
    starts = [0, 12, 36, 72] if packed else [0]
    for rank, share in enumerate(shares):
        places = []
        for start, length in zip(starts, packed or [36], strict=True):
            chunk = length // (2 * ranks)
            for number in (rank, 2 * ranks - 1 - rank):
                places += range(start + number * chunk, start + (number + 1) * chunk)
        assert torch.equal(share.tokens, whole.tokens[:, places])
        assert torch.equal(share.targets, whole.targets[:, places])
        assert torch.equal(share.position_ids, whole.position_ids[:, places])
        assert torch.equal(share.response_tokens, whole.response_tokens)
        assert share.cu_seqlens is whole.cu_seqlens is None or torch.equal(share.cu_seqlens, whole.cu_seqlens)
    assert sum(int(share.mask.sum()) for share in shares) == 8 + 15 + 33


def test_a_context_boundary_keeps_its_label():
    """verl PR #4250: the last position of a chunk was given a wrong label."""
    whole = padded([make_sample(1, 7, first_id=10)], 8)
    first, second = (context_share(whole, rank, 2) for rank in range(2))
    assert first.tokens.tolist() == [[10, 11, 16, 17]] and first.targets.tolist() == [[11, 12, 17, PAD]]
    assert second.tokens.tolist() == [[12, 13, 14, 15]] and second.targets.tolist() == [[13, 14, 15, 16]]
    assert first.mask.tolist() == [[True, True, True, False]] and second.mask.all()


def test_sequences_that_cannot_be_shared_are_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4 chunks"):
        context_share(padded([make_sample(1, 5)], 6), 0, 2)


@pytest.mark.parametrize("config", [BatchingConfig(2), BatchingConfig(1, 24), BatchingConfig(1, 24, packed=True)])
def test_the_micro_batches_of_all_ranks_hold_every_token_once(config):
    config = dataclasses.replace(config, sequence_multiple=4, total_multiple=8)
    samples = [make_sample(1 + i % 5, i % 8, advantage=i, first_id=100 * i) for i in range(13)]
    found = {}
    for dp_rank in range(3):
        for cp_rank in range(2):
            batcher = MicroBatcher(config, dp_rank=dp_rank, dp_size=3, cp_rank=cp_rank, cp_size=2, pad_id=PAD)
            for batch in batcher(samples):
                numbers = batch.sequence_ids[batch.mask].tolist()
                for number, target in zip(numbers, batch.targets[batch.mask].tolist(), strict=True):
                    assert target not in found
                    found[target] = batch.places[number]
    expected = {token: i for i, sample in enumerate(samples) for token in sample.completion.token_ids}
    assert found == expected
