"""Loads a Hugging Face checkpoint into the shards of a Megatron model."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.rl.errors import CheckpointError
from megatron.rl.weights.hf_config import dimensions_of, family_of
from megatron.rl.weights.hf_files import HfCheckpoint
from megatron.rl.weights.local_parameters import LocalParameter, Parallelism, local_parameters
from megatron.rl.weights.table import Dimensions, Family, pieces, units

if TYPE_CHECKING:  # the CPU platform must be installed before megatron.core is imported
    from megatron.core.process_groups_config import ProcessGroupCollection
    from transformers import PretrainedConfig

_COMPARED_ROWS = 4096
_BODY = "model."  # prefix of everything but the output head


def load_hf_weights(
    model_chunks: Sequence[torch.nn.Module],
    hf_dir: str | Path,
    *,
    hf_config: "PretrainedConfig",
    pg_collection: "ProcessGroupCollection",
) -> None:
    """Fills this rank's parameters from the safetensors files of ``hf_dir``, reading only the slices it holds.

    Values are cast to the parameters' dtype; the rows that pad the vocabulary become zero. An optimizer that keeps
    float32 copies of the parameters must take them over afterwards (``optimizer.reload_model_params()``).

    Args:
        model_chunks: the virtual pipeline stages of this rank, wrapped or not.
        hf_config: the folder's, as :func:`megatron.rl.weights.read_hf_config` gives it.
        pg_collection: uses tp, pp, ep and expt_tp.

    Raises:
        CheckpointError: a file that is missing or damaged, a tensor that is missing, unexpected or of another shape,
            a parameter of the model that the checkpoint cannot fill.
        ConfigError: an unsupported architecture.
    """
    family, dims = family_of(hf_config), dimensions_of(hf_config)
    groups = Parallelism.from_collection(pg_collection)
    with HfCheckpoint(hf_dir) as checkpoint, torch.no_grad():
        _match_tensors(checkpoint, family, dims)
        _check_copies(checkpoint, family)
        for local in local_parameters(model_chunks, family, dims, groups):
            _fill(local, dims, groups, checkpoint)


def check_hf_weights(hf_dir: str | Path, *, hf_config: "PretrainedConfig") -> None:
    """Holds the headers of the folder's files against its configuration; the same errors as :func:`load_hf_weights`."""
    with HfCheckpoint(hf_dir) as checkpoint:
        _match_tensors(checkpoint, family_of(hf_config), dimensions_of(hf_config))


def _match_tensors(checkpoint: HfCheckpoint, family: Family, dims: Dimensions) -> None:
    """The folder holds the tensors that the table promises, with their shapes, and no others. Equal on all ranks."""
    expected = {
        name: dims.shape(tensor)
        for unit in units(family, dims)
        for name, tensor in zip(unit.hf_names(), unit.row.hf, strict=True)
    }
    _rename(checkpoint, family, {*expected, *family.copies})
    expected |= {copy: expected[name] for copy, name in family.copies.items() if copy in checkpoint.names}
    if missing := sorted(expected.keys() - checkpoint.names):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor {missing[0]} of shape {expected[missing[0]]} is missing ({len(missing)} in "
            f"all); config.json and weights must be of one {family.architecture}"
        )
    ignored = re.compile("|".join(family.ignored))
    if unexpected := sorted(name for name in checkpoint.names - expected.keys() if not ignored.fullmatch(name)):
        raise CheckpointError(
            f"{checkpoint.file(unexpected[0])}: tensor {unexpected[0]} of shape {checkpoint.shape(unexpected[0])} is "
            f"not part of {family.architecture} as config.json describes it ({len(unexpected)} such tensors)"
        )
    for name, shape in expected.items():
        if (found := checkpoint.shape(name)) != shape:
            raise CheckpointError(
                f"{checkpoint.file(name)}: tensor {name} has shape {found}, config.json asks for {shape}"
            )


def _rename(checkpoint: HfCheckpoint, family: Family, known: set[str]) -> None:
    """As ``transformers`` finds them: tensors of the body saved by itself, and a tied head without its embedding."""
    for stored in sorted(checkpoint.names - known):
        for name in (_BODY + stored, stored.removeprefix(_BODY)):
            if name in known:
                if name in checkpoint.names:
                    raise CheckpointError(
                        f"{checkpoint.file(stored)}: both {stored} and {name} are there, which are one tensor of "
                        f"{family.architecture}; leave one of them out"
                    )
                checkpoint.rename(stored, name)
                break
    for copy, name in family.copies.items():
        if copy in checkpoint.names and name not in checkpoint.names:
            checkpoint.rename(copy, name)


def _check_copies(checkpoint: HfCheckpoint, family: Family) -> None:
    """A tied head that stands in the file is the embedding; ``transformers`` would use one that is not."""
    for copy, name in family.copies.items():
        if copy not in checkpoint.names:
            continue
        rows = checkpoint.shape(name)[0]
        for start in range(0, rows, _COMPARED_ROWS):
            part = (0, start, min(_COMPARED_ROWS, rows - start))
            if not torch.equal(checkpoint.read(copy, *part), checkpoint.read(name, *part)):
                raise CheckpointError(
                    f"{checkpoint.file(copy)}: {copy} differs from {name}, though config.json ties them; "
                    "set tie_word_embeddings to false there"
                )


def _fill(local: LocalParameter, dims: Dimensions, groups: Parallelism, checkpoint: HfCheckpoint) -> None:
    row, shard_dim = local.unit.row, local.unit.row.shard.dim
    group = groups.shard_group(row)
    names = local.unit.hf_names()
    size = local.parameter.shape[shard_dim]
    for piece in pieces(row, dims, rank=group.rank(), parts=groups.parts(row), shard_size=size):
        target = local.parameter.data.narrow(shard_dim, piece.start, piece.length)
        if piece.source is None:
            target.zero_()
        else:
            target.copy_(checkpoint.read(names[piece.source], shard_dim, piece.hf_start, piece.length))
