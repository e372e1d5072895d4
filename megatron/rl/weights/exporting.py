"""Streams a sharded Megatron model out as whole Hugging Face tensors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.rl.weights.hf_config import dimensions_of, family_of
from megatron.rl.weights.local_parameters import Parallelism, local_parameters
from megatron.rl.weights.table import Dimensions, Row, Unit, pieces, units

if TYPE_CHECKING:  # the CPU platform must be installed before megatron.core is imported
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class _Holding:
    """What the other pipeline stages must know of a parameter to receive it."""

    stage: int
    shard_shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Export:
    dims: Dimensions
    groups: Parallelism
    parameters: dict[Unit, torch.nn.Parameter]
    holdings: dict[tuple[int, int | None], _Holding]  # by (row's number, layer)
    device: torch.device


def export_hf_weights(
    model_chunks: Sequence[torch.nn.Module],
    *,
    hf_config: "PretrainedConfig",
    pg_collection: "ProcessGroupCollection",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (Hugging Face name, whole tensor) for every tensor of the checkpoint format, in the table's order.

    Collective over all ranks of tp, pp, ep and expt_tp: every rank iterates to the end and gets the same tensors in
    the same order. At most one Megatron parameter is gathered at a time. The tensors are fresh memory on the
    parameters' device and in their dtype; the vocabulary's padding is cut off and a tied head is left out.

    Raises:
        CheckpointError: the model is not the one that ``hf_config`` describes.
        ConfigError: an unsupported architecture.
    """
    family, dims = family_of(hf_config), dimensions_of(hf_config)
    groups = Parallelism.from_collection(pg_collection)
    numbers = {row: number for number, row in enumerate(family.rows)}
    parameters = {
        local.unit: local.parameter
        for local in local_parameters(model_chunks, family, dims, groups)
        if local.unit.row.exported
    }
    export = _Export(dims, groups, parameters, _holdings(parameters, numbers, groups), _device(parameters))
    for unit in units(family, dims):
        if unit.row.exported:
            holding = export.holdings[numbers[unit.row], unit.layer]
            yield from _whole_tensors(unit, holding, export)


def exported_sizes(hf_config: "PretrainedConfig") -> dict[str, int]:
    """Every tensor that :func:`export_hf_weights` yields, in its order, with the number of its elements."""
    family, dims = family_of(hf_config), dimensions_of(hf_config)
    return {
        name: math.prod(dims.shape(tensor))
        for unit in units(family, dims)
        if unit.row.exported
        for name, tensor in zip(unit.hf_names(), unit.row.hf, strict=True)
    }


def _holdings(
    parameters: Mapping[Unit, torch.nn.Parameter], numbers: Mapping[Row, int], groups: Parallelism
) -> dict[tuple[int, int | None], _Holding]:
    """Asks all pipeline stages once what they hold. The experts of a layer are alike, so one speaks for all."""
    stage = groups.pp.rank()
    mine = {
        (numbers[unit.row], unit.layer): _Holding(stage, tuple(parameter.shape), parameter.dtype)
        for unit, parameter in parameters.items()
    }
    if groups.pp.size() == 1:
        return mine
    gathered: list[dict[tuple[int, int | None], _Holding]] = [{} for _ in range(groups.pp.size())]
    dist.all_gather_object(gathered, mine, group=groups.pp)
    return {key: holding for stage_holds in gathered for key, holding in stage_holds.items()}


def _device(parameters: Mapping[Unit, torch.nn.Parameter]) -> torch.device:
    return next(iter(parameters.values())).device


def _whole_tensors(unit: Unit, holding: _Holding, export: _Export) -> Iterator[tuple[str, torch.Tensor]]:
    row, dims = unit.row, export.dims
    shards = _gather(unit, holding, export)
    names = unit.hf_names()
    whole = [torch.empty(dims.shape(tensor), dtype=holding.dtype, device=export.device) for tensor in row.hf]
    dim = row.shard.dim
    for rank, shard in enumerate(shards):
        for piece in pieces(row, dims, rank=rank, parts=len(shards), shard_size=shard.shape[dim]):
            if piece.source is not None:
                target = whole[piece.source].narrow(dim, piece.hf_start, piece.length)
                target.copy_(shard.narrow(dim, piece.start, piece.length))
    yield from zip(names, whole, strict=True)


@torch.no_grad()
def _gather(unit: Unit, holding: _Holding, export: _Export) -> torch.Tensor:
    """All shards of one parameter, [shards, *shard shape], on every rank.

    The holders gather over the (expert) tensor-parallel group; the result goes to the other expert-parallel ranks,
    then to the other pipeline stages.
    """
    groups, row = export.groups, unit.row
    parts = groups.parts(row)
    shards = torch.empty((parts, *holding.shard_shape), dtype=holding.dtype, device=export.device)
    parameter = export.parameters.get(unit)
    if parameter is not None:
        if parts == 1:
            shards[0].copy_(parameter)
        else:
            gathered = list(shards.unbind(0))
            dist.all_gather(gathered, parameter.detach().contiguous(), group=groups.shard_group(row))
    if unit.expert is not None and groups.ep.size() > 1 and holding.stage == groups.pp.rank():
        owner = unit.expert // (export.dims.experts // groups.ep.size())
        dist.broadcast(shards, group=groups.ep, group_src=owner)
    if groups.pp.size() > 1:
        dist.broadcast(shards, group=groups.pp, group_src=holding.stage)
    return shards
