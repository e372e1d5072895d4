"""Reading folders of safetensors, whole ones and damaged ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights.hf_files import HfCheckpoint

TENSORS = {f"t{i}": torch.arange(35.0).reshape(5, 7) + i for i in range(4)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path):
    """A folder with one file."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """A folder with two files, even and odd tensors, and their index."""
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(TENSORS)}
    for part in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map[name] == part}, tmp_path / part)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def _refused(folder, *words):
    with pytest.raises(CheckpointError) as caught, HfCheckpoint(folder):
        pass
    for word in (str(folder), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_names_shapes_and_slices(kind, request):
    with HfCheckpoint(request.getfixturevalue(kind)) as checkpoint:
        assert checkpoint.names == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert checkpoint.shape(name) == (5, 7)
            assert torch.equal(checkpoint.read(name, 0, 1, 3), tensor[1:4])
            assert torch.equal(checkpoint.read(name, 1, 6, 1), tensor[:, 6:])
        assert checkpoint.file("t1").name == ("model.safetensors" if kind == "single" else "part-1.safetensors")


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    _refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")


def test_a_truncated_file(single):
    data = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").write_bytes(data[: len(data) // 2])
    _refused(single, "model.safetensors: damaged")


def test_a_missing_shard(sharded):
    (sharded / "part-1.safetensors").unlink()
    _refused(sharded, "part-1.safetensors: missing")


def test_an_index_that_names_the_wrong_shard(sharded):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "t1": "part-0.safetensors"}}))
    _refused(sharded, "part-0.safetensors: t1 is not in it")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"t1": 3}}'])
def test_a_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    _refused(sharded, f"{INDEX}: not an index")
