"""Finds the table row of each parameter that this rank holds."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.rl.errors import CheckpointError
from megatron.rl.weights.table import Dimensions, Family, Row, Unit, Where, fits, units

if TYPE_CHECKING:  # the CPU platform must be installed before megatron.core is imported
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class Parallelism:
    """This rank's place in the groups over which weights are cut."""

    tp: torch.distributed.ProcessGroup
    expert_tp: torch.distributed.ProcessGroup
    ep: torch.distributed.ProcessGroup
    pp: torch.distributed.ProcessGroup

    @classmethod
    def from_collection(cls, groups: "ProcessGroupCollection") -> "Parallelism":
        """Takes the four groups that weights need."""
        return cls(tp=groups.tp, expert_tp=groups.expt_tp, ep=groups.ep, pp=groups.pp)

    def shard_group(self, row: Row) -> torch.distributed.ProcessGroup:
        """The group over which one tensor of ``row`` is cut."""
        return self.expert_tp if row.shard.is_expert else self.tp

    def parts(self, row: Row) -> int:
        """Into how many shards one tensor of ``row`` is cut."""
        return self.shard_group(row).size() if row.shard.is_cut else 1


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, and the unit of the table of which it is a shard."""

    name: str  # in its model chunk, for messages
    unit: Unit
    parameter: torch.nn.Parameter


def local_parameters(
    model_chunks: Sequence[torch.nn.Module], family: Family, dims: Dimensions, groups: Parallelism
) -> list[LocalParameter]:
    """All parameters of this rank's model chunks, which may be wrapped for data parallelism and half precision.

    Raises:
        CheckpointError: the model is not the one that the family's table and the config describe.
    """
    from megatron.core.utils import unwrap_model

    patterns = [(re.compile(_pattern(name)), row) for row in family.rows for name in row.megatron]
    found: list[LocalParameter] = []
    for wrapped in model_chunks:
        chunk = unwrap_model(wrapped)
        if chunk.config.num_layers != len(dims.moe_layers):
            raise CheckpointError(
                f"the model has {chunk.config.num_layers} layers, config.json {len(dims.moe_layers)}; "
                "leave --num-layers out"
            )
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        named = list(_matched(chunk, layers, patterns, dims, groups, family))
        _check_complete(named, _expected(chunk, layers, family, dims, groups), family)
        for local in named:
            _check_shape(local, dims, groups)
        found.extend(named)
    return found


def _matched(
    chunk: torch.nn.Module,
    layers: Sequence[int],
    patterns: Sequence[tuple[re.Pattern, Row]],
    dims: Dimensions,
    groups: Parallelism,
    family: Family,
) -> Iterator[LocalParameter]:
    first_expert = groups.ep.rank() * (dims.experts // groups.ep.size())
    for name, parameter in chunk.named_parameters():
        row, numbers = _match(name, patterns, family)
        layer = layers[int(numbers["layer"])] if "layer" in numbers else None
        expert = first_expert + int(numbers["expert"]) if "expert" in numbers else None
        yield LocalParameter(name, Unit(row, layer, expert), parameter)


def _expected(
    chunk: torch.nn.Module, layers: Sequence[int], family: Family, dims: Dimensions, groups: Parallelism
) -> set[Unit]:
    """The units that this chunk must hold."""
    count = dims.experts // groups.ep.size()
    experts = range(groups.ep.rank() * count, (groups.ep.rank() + 1) * count)
    held = set(layers)
    outside = {Where.INPUT: chunk.pre_process, Where.OUTPUT: chunk.post_process}
    return {
        unit
        for unit in units(family, dims)
        if outside.get(unit.row.where, unit.layer in held) and (unit.expert is None or unit.expert in experts)
    }


def _check_complete(named: Sequence[LocalParameter], expected: set[Unit], family: Family) -> None:
    for local in named:
        if local.unit not in expected:
            raise _alien(local.name, family)
    lacking = expected - {local.unit for local in named}
    # A tied head is a parameter of its own only where the embedding is on another pipeline stage.
    if absent := sorted(unit.hf_names()[0] for unit in lacking if unit.row.exported):
        raise CheckpointError(
            f"the model has no parameter for {absent[0]} of {family.architecture} ({len(absent)} such tensors on this "
            "rank); leave out the model flag that differs from config.json"
        )


def _check_shape(local: LocalParameter, dims: Dimensions, groups: Parallelism) -> None:
    row, shape = local.unit.row, tuple(local.parameter.shape)
    if not fits(row, dims, shape, groups.parts(row)):
        names = " + ".join(local.unit.hf_names())
        shapes = " + ".join(str(dims.shape(tensor)) for tensor in row.hf)
        raise CheckpointError(
            f"{names} of shape {shapes} do not fit the model's {local.name} of shape {shape} (shard of "
            f"{groups.parts(row)}); leave out the model flag that differs from config.json"
        )


def _pattern(name: str) -> str:
    escaped = re.escape(name)
    for key in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + key + "}"), rf"(?P<{key}>\d+)")
    return escaped


def _match(name: str, patterns: Sequence[tuple[re.Pattern, Row]], family: Family) -> tuple[Row, dict[str, str]]:
    for pattern, row in patterns:
        if found := pattern.fullmatch(name):
            return row, found.groupdict()
    raise _alien(name, family)


def _alien(name: str, family: Family) -> CheckpointError:
    return CheckpointError(
        f"the model has a parameter {name} that {family.architecture} with this config.json has not; "
        "leave out the model flag that adds it"
    )
