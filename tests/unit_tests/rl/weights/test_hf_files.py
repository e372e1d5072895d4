"""Reading folders of safetensors, whole ones and damaged ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights.hf_files import HfCheckpoint

TENSORS = {f"t{i}": torch.arange(35.0).reshape(5, 7) + i for i in range(4)}
INDEX = "model.safetensors.index.json"


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


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
    write_index(tmp_path, weight_map)
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
    (tmp_path / "consolidated.safetensors").touch()
    _refused(tmp_path, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_weights_in_pickles_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).touch()
    _refused(tmp_path, name, "must be in safetensors", "AutoModelForCausalLM.from_pretrained", "save_pretrained")


def test_the_single_file_comes_before_an_index(single):
    """As in ``transformers``, which does not look at the index then."""
    write_index(single, {"t1": "gone.safetensors"})
    with HfCheckpoint(single) as checkpoint:
        assert checkpoint.names == TENSORS.keys()


def test_a_link_to_a_file_that_is_gone_is_no_single_file(sharded):
    (sharded / "model.safetensors").symlink_to("nowhere")
    with HfCheckpoint(sharded) as checkpoint:
        assert checkpoint.file("t0").name == "part-0.safetensors"


def test_every_tensor_of_a_listed_shard_counts(sharded):
    write_index(sharded, {"t0": "part-0.safetensors", "t1": "part-1.safetensors"})
    with HfCheckpoint(sharded) as checkpoint:
        assert checkpoint.names == TENSORS.keys()


def test_a_shard_that_the_index_does_not_list_does_not(sharded):
    write_index(sharded, {"t0": "part-0.safetensors"})
    with HfCheckpoint(sharded) as checkpoint:
        assert checkpoint.names == {"t0", "t2"}


def test_a_tensor_in_two_shards(sharded):
    save_file(TENSORS, sharded / "part-1.safetensors")
    _refused(sharded, "part-1.safetensors: t0 is in part-0.safetensors too")


def test_a_renamed_tensor_is_read_under_its_name_in_the_file(single):
    with HfCheckpoint(single) as checkpoint:
        checkpoint.rename("t1", "other")
        assert checkpoint.names == {"t0", "other", "t2", "t3"}
        assert torch.equal(checkpoint.read("other", 0, 0, 5), TENSORS["t1"])


def test_a_truncated_file(single):
    data = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").write_bytes(data[: len(data) // 2])
    _refused(single, "model.safetensors: damaged")


def test_a_missing_shard(sharded):
    (sharded / "part-1.safetensors").unlink()
    _refused(sharded, "part-1.safetensors: missing")


def test_an_index_that_names_the_wrong_shard(sharded):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    write_index(sharded, {**weight_map, "t1": "part-0.safetensors"})
    _refused(sharded, "part-0.safetensors: t1 is not in it")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"t1": 3}, "metadata": {}}']
)
def test_a_broken_index(sharded, text):
    (sharded / INDEX).write_text(text)
    _refused(sharded, f"{INDEX}: not an index")


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}])
def test_an_index_that_transformers_cannot_read(sharded, metadata):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"t0": "part-0.safetensors"}, **metadata}))
    _refused(sharded, f'{INDEX}: without "metadata"')
