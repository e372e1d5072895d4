"""The live hand-over: exported tensors in a ``transformers`` model give what loading their files gives."""

import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights import load_into_hf_model
from tests.unit_tests.rl.weights import tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The tensors of the MoE checkpoint as its file names them."""
    folder = tmp_path_factory.mktemp("hf_model")
    tiny.save_hf("qwen3-moe-unnormalised", folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_every_layout_in_memory(name, tmp_path):
    source = tiny.save_hf(name, tmp_path)
    target = tiny.hf_model(name, seed=1)
    storage = [parameter.data_ptr() for parameter in target.parameters()]
    load_into_hf_model(target, load_file(tmp_path / "model.safetensors").items())
    for expected, parameter in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(expected, parameter)
    assert [parameter.data_ptr() for parameter in target.parameters()] == storage, "must be filled in place"
    tokens = torch.arange(11)[None]
    assert torch.equal(source(tokens).logits, target(tokens).logits)


def test_values_are_cast_to_the_models_dtype(files):
    model = tiny.hf_model("qwen3-moe-unnormalised", torch.bfloat16)
    load_into_hf_model(model, files.items())
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, files["lm_head.weight"].bfloat16())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.3.gate_proj.weight", "model.norm.weight"])
def test_a_tensor_left_out(files, name):
    tensors = [item for item in files.items() if item[0] != name]
    with pytest.raises(CheckpointError, match=r"was not given all of parameter model\..*1 parameters in all"):
        load_into_hf_model(tiny.hf_model("qwen3-moe-unnormalised"), tensors)


@pytest.mark.parametrize("name", ["model.extra.weight", "model.layers.0.mlp.experts.4.up_proj.weight"])
def test_a_tensor_without_a_place(files, name):
    with pytest.raises(CheckpointError, match=f"tensor {name} has no place in Qwen3MoeForCausalLM"):
        load_into_hf_model(tiny.hf_model("qwen3-moe-unnormalised"), [*files.items(), (name, torch.ones(12, 24))])


def test_a_tensor_of_another_shape(files):
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    with pytest.raises(CheckpointError, match=r"experts.3.gate_proj.weight of shape \(12, 1\).*\(12, 24\)"):
        load_into_hf_model(tiny.hf_model("qwen3-moe-unnormalised"), {**files, name: torch.ones(12, 1)}.items())


def test_a_tensor_given_twice(files):
    name = "model.layers.0.mlp.experts.3.gate_proj.weight"
    with pytest.raises(CheckpointError, match="given twice"):
        load_into_hf_model(tiny.hf_model("qwen3-moe-unnormalised"), [*files.items(), (name, files[name])])
