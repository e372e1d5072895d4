"""The piece arithmetic that import and export share, by itself."""

import pytest

from megatron.rl.weights import rows
from megatron.rl.weights.hf_config import FAMILIES
from megatron.rl.weights.table import Dimensions, Piece, Unit, fits, pieces, units

DIMS = Dimensions.from_arguments(
    {
        "num_layers": 3,
        "hidden_size": 12,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 5,
        "ffn_hidden_size": 16,
        "moe_ffn_hidden_size": 8,
        "num_experts": 2,
        "moe_layer_freq": [0, 1, 0],
        "vocab_size": 61,
    }
)


def _shard_size(row, parts):
    whole = sum(DIMS.shape(tensor)[row.shard.dim] for tensor in row.hf)
    if row in (rows.EMBEDDING, rows.HEAD):
        whole = 64
    return whole // parts if row.shard.is_cut else whole


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_shards_and_hf_tensors_are_covered_exactly_once(parts):
    every_row = {row for family in FAMILIES.values() for row in family.rows}
    for row in every_row:
        size = _shard_size(row, parts)
        hf = {(source, i): 0 for source, tensor in enumerate(row.hf) for i in range(DIMS.shape(tensor)[row.shard.dim])}
        for rank in range(parts if row.shard.is_cut else 1):
            filled = []
            for piece in pieces(row, DIMS, rank=rank, parts=parts, shard_size=size):
                filled += range(piece.start, piece.start + piece.length)
                for i in range(piece.length if piece.source is not None else 0):
                    hf[piece.source, piece.hf_start + i] += 1
            assert filled == list(range(size)), row.megatron
        assert set(hf.values()) == {1}, row.megatron


def test_query_groups_are_interleaved():
    assert list(pieces(rows.QKV, DIMS, rank=1, parts=2, shard_size=40)) == [
        Piece(0, 20, 0, 10),  # query heads 4 and 5, of group 2
        Piece(1, 10, 10, 5),
        Piece(2, 10, 15, 5),
        Piece(0, 30, 20, 10),
        Piece(1, 15, 30, 5),
        Piece(2, 15, 35, 5),
    ]


def test_more_ranks_than_query_groups_cut_through_a_group():
    assert list(pieces(rows.QKV, DIMS, rank=0, parts=8, shard_size=10)) == [Piece(0, 0, 0, 10)]
    assert list(pieces(rows.QKV, DIMS, rank=1, parts=8, shard_size=10)) == [Piece(1, 0, 0, 5), Piece(2, 0, 5, 5)]


def test_each_rank_holds_a_part_of_gate_and_up():
    assert list(pieces(rows.MLP_IN, DIMS, rank=1, parts=4, shard_size=8)) == [Piece(0, 4, 0, 4), Piece(1, 4, 4, 4)]


def test_a_rank_may_hold_padding_only():
    assert list(pieces(rows.HEAD, DIMS, rank=2, parts=3, shard_size=24)) == [
        Piece(0, 48, 0, 13),
        Piece(None, 0, 13, 11),
    ]
    assert list(pieces(rows.HEAD, DIMS, rank=3, parts=4, shard_size=24)) == [Piece(None, 11, 0, 24)]


def test_fits():
    assert fits(rows.HEAD, DIMS, (16, 12), 4)
    assert not fits(rows.HEAD, DIMS, (15, 12), 4), "60 rows cannot hold 61"
    assert not fits(rows.HEAD, DIMS, (16, 11), 4)
    assert fits(rows.QKV, DIMS, (40, 12), 2)
    assert not fits(rows.QKV, DIMS, (40, 12), 1)
    assert fits(rows.FINAL_NORM, DIMS, (12,), 1)
    assert not fits(rows.FINAL_NORM, DIMS, (12, 1), 1)


def test_units_follow_the_layers_and_the_pattern_of_experts():
    listed = list(units(FAMILIES["qwen3_moe"], DIMS))
    assert len(listed) == len(set(listed))
    assert (listed[0], listed[-2:]) == (Unit(rows.EMBEDDING), [Unit(rows.FINAL_NORM), Unit(rows.HEAD)])
    assert [unit.layer for unit in listed[1:-2]] == sorted(unit.layer for unit in listed[1:-2])
    assert [(u.layer, u.expert) for u in listed if u.row is rows.EXPERT_IN] == [(1, 0), (1, 1)]
    assert [u.layer for u in listed if u.row is rows.MLP_IN] == [0, 2]
    assert Unit(rows.EXPERT_IN, 1, 1).hf_names() == (
        "model.layers.1.mlp.experts.1.gate_proj.weight",
        "model.layers.1.mlp.experts.1.up_proj.weight",
    )


def test_the_window_never_leaves_the_vocabulary_uncovered():
    one_row = Dimensions.from_arguments({"vocab_size": 1, "hidden_size": 3, "num_layers": 1})
    assert list(pieces(rows.EMBEDDING, one_row, rank=0, parts=2, shard_size=1)) == [Piece(0, 0, 0, 1)]
    assert list(pieces(rows.EMBEDDING, one_row, rank=1, parts=2, shard_size=1)) == [Piece(None, 0, 0, 1)]
