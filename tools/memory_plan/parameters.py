"""How many parameters each rank of a pipeline stage holds, from the table that import and export follow."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

from megatron.rl.weights import exported_sizes
from megatron.rl.weights.hf_config import dimensions_of, family_of
from megatron.rl.weights.table import Dimensions, Fuse, Row, Where, units


@dataclass(frozen=True)
class Layers:
    """A pipeline stage's layers, by the kind of their MLP."""

    dense: int
    moe: int


@dataclass(frozen=True)
class Counts:
    """Parameters of one rank. Experts are shared out over other groups than the rest."""

    dense: int = 0
    expert: int = 0

    @property
    def all(self) -> int:
        return self.dense + self.expert


def stage_of_layer(layer: int, args: argparse.Namespace) -> int:
    """The pipeline stage of a layer: virtual stages go round the ranks."""
    per_chunk = args.num_layers // (args.pipeline_model_parallel_size * virtual_stages(args))
    return layer // per_chunk % args.pipeline_model_parallel_size


def virtual_stages(args: argparse.Namespace) -> int:
    """Model chunks of each pipeline rank."""
    return args.virtual_pipeline_model_parallel_size or 1


def layers_of_stage(stage: int, args: argparse.Namespace, dims: Dimensions) -> Layers:
    """How many of its layers have experts, how many a plain MLP."""
    here = [is_moe for layer, is_moe in enumerate(dims.moe_layers) if stage_of_layer(layer, args) == stage]
    return Layers(dense=here.count(False), moe=here.count(True))


def whole_model(hf_config: Any) -> int:
    """Parameters of the checkpoint; a tied head is the embedding."""
    return sum(exported_sizes(hf_config).values())


def of_stage(stage: int, args: argparse.Namespace, hf_config: Any, padded_vocab_size: int) -> Counts:
    """What one rank of the stage holds: its shards of its layers, its experts, and the embeddings at the ends."""
    family, dims = family_of(hf_config), dimensions_of(hf_config)
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    last = args.pipeline_model_parallel_size - 1
    dense = expert = 0
    for unit in units(family, dims):
        row = unit.row
        if row.where is Where.INPUT and stage != 0 or row.where is Where.OUTPUT and stage != last:
            continue
        if unit.layer is not None and stage_of_layer(unit.layer, args) != stage:
            continue
        if not row.exported and last == 0:
            continue  # a tied head on the embedding's own stage is the same parameter
        size = _size(row, dims, padded_vocab_size)
        if row.shard.is_expert:
            expert += size // etp
        else:
            dense += size // tp if row.shard.is_cut else size
    return Counts(dense, expert // ep)


def _size(row: Row, dims: Dimensions, padded_vocab_size: int) -> int:
    if row.fuse is Fuse.PAD_VOCAB:
        return padded_vocab_size * dims.sizes["hidden"]
    return sum(math.prod(dims.shape(tensor)) for tensor in row.hf)
