"""Imports under Transformer Engine's names, into single shards, and everything that can be wrong with a folder."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights import check_hf_weights, load_hf_weights, read_hf_config
from tests.unit_tests.rl.weights import tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("importing")
    for name in ("qwen3-moe-unnormalised", "llama-tied", "qwen2"):
        tiny.save_hf(name, root / name)
    return root


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the MoE checkpoint, to be spoilt."""
    return shutil.copytree(folders / "qwen3-moe-unnormalised", tmp_path / "model")


def _load(folder, layout=None, config=None, chunk=None, **stub):
    layout = layout or tiny.groups()
    config = config or read_hf_config(folder)
    chunk = chunk or tiny.StubChunk(config, layout, **stub)
    load_hf_weights([chunk], folder, hf_config=config, pg_collection=layout)
    return chunk.by_name


def _rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _refused(folder, *words, **options):
    with pytest.raises(CheckpointError) as caught:
        _load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_transformer_engine_names_hold_the_same_values(folders):
    for name in ("qwen3-moe-unnormalised", "qwen2"):
        local, te = (_load(folders / name, transformer_engine=flag) for flag in (False, True))
        assert local.keys() != te.keys()
        assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in te
        assert len(local) == len(te)
        for ours, theirs in zip(local.values(), te.values(), strict=True):
            assert torch.equal(ours, theirs)
            assert not ours.isnan().any()


def test_grouped_experts_of_an_expert_parallel_rank(folders):
    layout = tiny.groups(tp=2, tp_rank=1, ep=2, ep_rank=1, etp=2, etp_rank=1)
    shard = _load(folders / "qwen3-moe-unnormalised", layout, transformer_engine=True)
    files = load_file(folders / "qwen3-moe-unnormalised" / "model.safetensors")
    experts = "model.layers.2.mlp.experts.3."  # the second expert of the second half
    gate, up = (files[f"{experts}{name}_proj.weight"][6:] for name in ("gate", "up"))
    assert torch.equal(shard["decoder.layers.2.mlp.experts.linear_fc1.weight1"], torch.cat([gate, up]))
    down = files[experts + "down_proj.weight"][:, 6:]
    assert torch.equal(shard["decoder.layers.2.mlp.experts.linear_fc2.weight1"], down)


def test_padded_rows_are_zero_and_values_are_cast(folders):
    config = read_hf_config(folders / "qwen2")
    chunk = tiny.StubChunk(config, tiny.groups())
    chunk.by_name = {k: torch.nn.Parameter(v.data.bfloat16()) for k, v in chunk.by_name.items()}
    loaded = _load(folders / "qwen2", chunk=chunk)["output_layer.weight"]
    head = load_file(folders / "qwen2" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(loaded[: tiny.VOCAB], head.bfloat16())
    assert torch.equal(loaded[tiny.VOCAB :], torch.zeros(3, 24, dtype=torch.bfloat16))


def test_only_the_slices_of_the_shard_are_read(folders, monkeypatch):
    from megatron.rl.weights.hf_files import HfCheckpoint

    read = []
    original = HfCheckpoint.read

    def counted(self, *arguments):
        tensor = original(self, *arguments)
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HfCheckpoint, "read", counted)
    shard = _load(folders / "qwen3-moe-unnormalised", tiny.groups(tp=4, tp_rank=1, ep=2, etp=2))
    assert sum(read) == sum(parameter.numel() for parameter in shard.values())


def test_a_tied_head_may_stand_in_the_file_if_it_is_the_embedding(folders, tmp_path):
    folder = shutil.copytree(folders / "llama-tied", tmp_path / "model")

    def add_head(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _rewrite(folder, add_head)
    _load(folder)

    def change_head(tensors):
        tensors["lm_head.weight"][60, 3] += 1

    _rewrite(folder, change_head)
    _refused(folder, "lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings")


def test_rotary_buffers_of_old_files_are_ignored(folder):
    _rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    _load(folder)


@pytest.mark.parametrize(
    "stored, name",
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("model.lm_head.weight", "lm_head.weight")],
)
def test_one_tensor_under_two_names(folder, stored, name):
    _rewrite(folder, lambda tensors: tensors.update({stored: tensors[name].clone()}))
    _refused(folder, f"both {stored} and {name} are there")


def test_headers_are_enough_to_refuse_a_folder(folder):
    config = read_hf_config(folder)
    check_hf_weights(folder, hf_config=config)
    _rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight of shape \(61, 24\) is missing"):
        check_hf_weights(folder, hf_config=config)


def test_a_missing_tensor(folder):
    _rewrite(folder, lambda tensors: tensors.pop("model.layers.3.mlp.experts.2.up_proj.weight"))
    _refused(folder, "model.layers.3.mlp.experts.2.up_proj.weight of shape (12, 24) is missing", str(folder))


def test_an_unexpected_tensor(folder):
    _rewrite(folder, lambda tensors: tensors.update({"model.layers.0.mlp.shared.weight": torch.ones(2, 3)}))
    _refused(folder, "model.layers.0.mlp.shared.weight of shape (2, 3)", "Qwen3MoeForCausalLM", "model.safetensors")


def test_a_tensor_of_another_shape(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.ones(20, 23)}))
    _refused(folder, name, "(20, 23)", "(20, 24)", "model.safetensors")


def test_config_and_weights_of_two_models(folder):
    config = tiny.changed(read_hf_config(folder), num_hidden_layers=5)
    _refused(folder, "model.layers.4.", "is missing", config=config)


def test_a_model_of_other_sizes(folder):
    config = read_hf_config(folder)
    other = tiny.StubChunk(tiny.changed(config, moe_intermediate_size=14), tiny.groups())
    _refused(
        folder,
        "model.layers.0.mlp.experts.0.gate_proj.weight + model.layers.0.mlp.experts.0.up_proj.weight",
        "(12, 24) + (12, 24)",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight of shape (28, 24)",
        chunk=other,
    )


def test_a_model_with_fewer_layers(folder):
    other = tiny.StubChunk(tiny.changed(read_hf_config(folder), num_hidden_layers=3), tiny.groups())
    _refused(folder, "the model has 3 layers, config.json 4", "--num-layers", chunk=other)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda names: names.pop("decoder.layers.2.self_attention.q_layernorm.weight"), "no parameter for .*2.*q_norm"),
        (lambda names: names.pop("output_layer.weight"), "no parameter for lm_head.weight"),
        (lambda names: names.update({"mtp.weight": torch.nn.Parameter(torch.ones(1))}), "has a parameter mtp.weight"),
        (
            lambda names: names.update(
                {"decoder.layers.0.mlp.linear_fc2.weight": torch.nn.Parameter(torch.ones(24, 40))}
            ),
            "has a parameter decoder.layers.0.mlp.linear_fc2.weight",
        ),
    ],
)
def test_a_model_with_other_parameters(folder, change, message):
    chunk = tiny.StubChunk(read_hf_config(folder), tiny.groups())
    change(chunk.by_name)
    with pytest.raises(CheckpointError, match=message):
        _load(folder, chunk=chunk)
