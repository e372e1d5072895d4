"""A folder is one model: what is trained from it is what ``transformers`` loads from it, whatever stands in it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.rl.weights import check_hf_weights, load_hf_weights, read_hf_config
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.weights import tiny

LLAMA = {
    "model_type": "llama",
    "vocab_size": tiny.VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 10}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# config.json as it stands there: what it says, what it leaves out, and what says the same thing twice.
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama, all that has a default left out": (LLAMA, {}),
    "llama, null where that is the default": (LLAMA, {"head_dim": None, "num_key_value_heads": None}),
    "llama, rope_scaling null": (LLAMA, {"rope_theta": 3e4, "rope_scaling": None}),
    "llama, rope_scaling empty": (LLAMA, {"rope_theta": 3e4, "rope_scaling": {}}),
    "llama, rope_theta twice": (
        LLAMA,
        {"rope_theta": 3e4, "rope_parameters": {"rope_theta": 70, "rope_type": "default"}},
    ),
    "llama, rope_theta outside": (LLAMA, {"rope_theta": 70, "rope_parameters": {"rope_type": "default"}}),
    "llama, rope_parameters without a type": (LLAMA, {"rope_parameters": {"rope_theta": 70.0}}),
    "llama, rope_scaling beside rope_parameters": (
        LLAMA,
        {"rope_scaling": {"type": "default", "rope_theta": 50}, "rope_parameters": {"rope_theta": 9e5}},
    ),
    "llama, rope_scaling without theta beside rope_parameters with one": (
        LLAMA,
        {"rope_scaling": {"type": "default"}, "rope_theta": 50, "rope_parameters": {"rope_theta": 9e5}},
    ),
    "llama, type and rope_type": (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}),
    "llama3, old key": (
        LLAMA,
        {
            "rope_theta": 5e5,
            "rope_scaling": {**SCALING, "type": "llama3", "original_max_position_embeddings": 8192},
            "max_position_embeddings": 131072,
        },
    ),
    "llama3, original positions outside": (
        LLAMA,
        {
            "rope_scaling": {**SCALING, "rope_type": "llama3", "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3, original positions left out": (
        LLAMA,
        {"rope_scaling": {**SCALING, "rope_type": "llama3"}, "max_position_embeddings": 8192},
    ),
    "llama, swish": (LLAMA, {"hidden_act": "swish", "rms_norm_eps": 1e-2}),
    "llama, tied": (LLAMA, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, what only pre-training or generation reads": (
        LLAMA,
        {
            "pretraining_tp": 2,
            "use_cache": False,
            "torch_dtype": "float16",
            "attention_dropout": 0.5,
            "initializer_range": 0.5,
            "architectures": ["LlamaForSequenceClassification"],
            "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
            "bos_token_id": None,
            "eos_token_id": [3, 5],
            "pad_token_id": -1,
            "quantization_config": None,
            "sliding_window": None,
            "temperature": 0.3,
            "output_hidden_states": True,
            "_attn_implementation_autoset": True,
        },
    ),
    "qwen2, all that has a default left out": (
        {name: value for name, value in QWEN2.items() if name != "num_key_value_heads"},
        {"num_attention_heads": 32, "hidden_size": 64},  # 32 key heads by default
    ),
    "qwen2, null key heads": (QWEN2, {"num_key_value_heads": None}),
    "qwen2, a head size, which is no field of it": (QWEN2, {"head_dim": 8}),
    "qwen2, attention_bias, which it does not read": (QWEN2, {"attention_bias": True, "mlp_bias": True}),
    "qwen2, a window that is off": (QWEN2, {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0}),
    "qwen2, a window beyond its last layer": (QWEN2, {"use_sliding_window": True, "sliding_window": 3}),
    "qwen2, a window that is null": (QWEN2, {"use_sliding_window": True, "sliding_window": None}),
    "qwen3, head size left out": ({name: value for name, value in QWEN3.items() if name != "head_dim"}, {}),
    "qwen3, layer types of an old name": (QWEN3, {"layer_types": ["attention", "attention"]}),
    "qwen3, layer types against a window": (
        QWEN3,
        {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 3},
    ),
    "qwen3, partial rotation of one": (QWEN3, {"partial_rotary_factor": 1.0}),
    "moe, all that has a default left out": (
        {n: v for n, v in MOE.items() if n not in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        {"num_key_value_heads": ..., "head_dim": ...},
    ),
    "moe, norm_topk_prob left out": (MOE, {"mlp_only_layers": None, "num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "moe, experts under both names": (MOE, {"num_local_experts": 6, "norm_topk_prob": True}),
    "moe, experts under the new name": (MOE, {"num_local_experts": 6, "num_experts": ...}),
    "moe, dense layers": (MOE, {"mlp_only_layers": [0]}),
    "moe, a window that is off": (MOE, {"sliding_window": 3, "output_router_logits": True}),
}


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _left_over_index(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model-00001-of-00001.safetensors")
    _write_index(folder, dict.fromkeys(tensors, "model-00001-of-00001.safetensors"))


def _index_of_missing_files(folder: Path) -> None:
    _write_index(folder, {"model.norm.weight": "gone.safetensors"})


def _other_files(folder: Path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.fp16.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(b"not read")


def _renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rename(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({change(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")

    return rename


def _unlisted_tensors(folder: Path) -> None:
    """The index names the shards, and all that is in them counts."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part in (0, 1):
        save_file({name: tensors[name] for name in names[part::2]}, folder / f"part-{part}.safetensors")
    _write_index(folder, {names[0]: "part-0.safetensors", names[1]: "part-1.safetensors"})


def _rotary_buffers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    buffers = {f"{body}layers.0.self_attn.rotary_emb.inv_freq": torch.full((3,), 9.0) for body in ("", "model.")}
    save_file(tensors | buffers, folder / "model.safetensors")


def _head_alone(folder: Path) -> None:
    _renamed(lambda name: "lm_head.weight" if name == "model.embed_tokens.weight" else name)(folder)


def _head_twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")


TIED = "llama, tied"
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a left-over index": ("moe, dense layers", _left_over_index),
    "a left-over index of files that are gone": (TIED, _index_of_missing_files),
    "files that nobody names": (TIED, _other_files),
    "an index of some tensors": ("moe, dense layers", _unlisted_tensors),
    "a body saved by itself": (TIED, _renamed(lambda name: name.removeprefix("model."))),
    "a head inside the body": (
        "qwen3, partial rotation of one",
        _renamed(lambda n: n.replace("lm_head", "model.lm_head")),
    ),
    "rotary buffers": (TIED, _rotary_buffers),
    "a tied head without the embedding": (TIED, _head_alone),
    "a tied head beside the embedding": (TIED, _head_twice),
}


def _write(folder: Path, base: dict[str, Any], changes: dict[str, Any]) -> Path:
    """A folder with config.json as given, and random weights for what ``transformers`` makes of it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(base))
    tiny.write_config(folder, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tensors = revert_weight_conversion(model, model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    made = {case: _write(root / case, *config) for case, config in CONFIGS.items()}
    for case, (config, spoil) in FILES.items():
        made[case] = _write(root / case, *CONFIGS[config])
        spoil(made[case])
    return made


@dataclass
class Outcome:
    """One folder, read by both."""

    logprobs: float  # nat, largest difference on the same tokens
    frequencies: float  # largest relative difference of the rotary embedding's


@torch.no_grad()
def _compare(folder: Path, layout: Any) -> Outcome:
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    check_hf_weights(folder, hf_config=config)
    chunks = tiny.build(config, layout)
    load_hf_weights(chunks, folder, hf_config=config, pg_collection=layout.groups)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, tiny.VOCAB, (2, 50), generator=torch.Generator().manual_seed(5))
    difference = tiny.log_probs(chunks, tokens, layout) - theirs(tokens).logits.log_softmax(-1)
    frequencies = chunks[0].rotary_pos_emb.inv_freq / theirs.model.rotary_emb.inv_freq - 1
    return Outcome(difference.abs().max().item(), frequencies.abs().max().item())


def _compare_all(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, Outcome]:
    layout = tiny.initialize()
    return {case: _compare(folder, layout) for case, folder in folders.items()}


def test_log_probabilities_are_those_of_transformers(folders):
    [outcomes] = run_ranks(1, _compare_all, folders)
    assert outcomes.keys() == CONFIGS.keys() | FILES.keys()
    wrong = {case: outcome for case, outcome in outcomes.items() if not outcome.logprobs < 1e-4}
    assert not wrong
    assert all(outcome.frequencies < 1e-6 for outcome in outcomes.values())
