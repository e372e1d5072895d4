"""config.json: as ``transformers`` reads it, or one line that names the key and its value."""

import json

import pytest
from transformers import PretrainedConfig

from megatron.rl.errors import ConfigError
from megatron.rl.weights import megatron_arguments_from_hf, read_eos_token_ids, read_hf_config
from tests.unit_tests.rl.weights import tiny

LLAMA3 = {name: value for name, value in tiny.LLAMA3.items() if name != "rope_theta"}
FULL = ["full_attention"] * 4
WINDOW = {"layer_types": ..., "use_sliding_window": True, "sliding_window": 7}


@pytest.fixture
def write(tmp_path):
    """Writes the config.json of a tiny checkpoint with changes; ``...`` takes a key out."""

    def write_config(name="qwen3", **changes):
        (tmp_path / "config.json").write_text(tiny.hf_config(name).to_json_string())
        return tiny.write_config(tmp_path, **changes)

    return write_config


def _refused(folder, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_hf_config(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_values_of_a_hub_config(tmp_path):
    """Qwen3-30B-A3B's config.json, as the hub has it (written by transformers 4)."""
    written = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 32768,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = read_hf_config(tmp_path)
    assert isinstance(config, PretrainedConfig)
    arguments = megatron_arguments_from_hf(config)
    expected = {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 4,
        "kv_channels": 128,
        "moe_ffn_hidden_size": 768,
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "none",
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "add_bias_linear": False,
        "swiglu": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "rotary_base": 1000000,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen3", {"model_type": "gpt2"}, r"model_type 'gpt2' is not supported; supported are llama .LlamaForCausalLM"),
        ("qwen3", {"model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ("qwen3", {"model_type": ...}, "model_type None is not supported"),
        ("qwen3", {"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3", {"hidden_act": None}, "'hidden_act' expected str, got NoneType"),
        ("qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("qwen3", {"layer_types": [*FULL[:3], "sliding_attention"]}, "layer_types 'sliding_attention'"),
        ("qwen3", {"layer_types": FULL[:3]}, "num_hidden_layers. .4. must be equal to the number of .layer_types"),
        ("llama", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}, "layer_types 'sliding_attention'"),
        ("qwen2", {**WINDOW, "max_window_layers": 3}, "layer_types 'sliding_attention'"),
        ("qwen3", {**WINDOW, "max_window_layers": 0, "sliding_window": ...}, "layer_types 'sliding_attention'"),
        ("llama", {"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ("llama", {"attention_chunk_size": 16}, "attention_chunk_size 16 is not supported"),
        ("llama", {"num_kv_shared_layers": 2}, "num_kv_shared_layers 2 is not supported"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 7}, "sliding_window 7 is not supported"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 7, "layer_types": FULL}, "sliding_window 7"),
        ("llama", {"text_config": {"vocab_size": 7}}, "text_config .'vocab_size': 7. is not supported"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 7}}}, "per_layer_config .'0'.* is not supported"),
        ("llama", {"configuration_files": ["config.4.0.0.json"]}, "configuration_files .'config.4.0.0.json'. is not"),
        ("llama", {"transformers_weights": "a.safetensors"}, "transformers_weights 'a.safetensors' is not supported"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8' is not supported"),
        ("llama", {"quantization_config": {}}, "quantization_config .. is not supported"),
        (
            "llama",
            {"_attn_implementation": "flash_attention_2"},
            "_attn_implementation 'flash_attention_2' is not",
        ),
        ("qwen3-moe", {"_experts_implementation": "eager"}, "_experts_implementation 'eager' is not supported"),
        ("llama", {"return_dict": False}, "return_dict False is not supported; leave it out"),
        ("llama", {"output_attentions": True}, "output_attentions True is not supported; leave it out"),
        ("llama", {"pad_token_id": tiny.VOCAB}, f"pad_token_id {tiny.VOCAB} .* below vocab_size {tiny.VOCAB}"),
        ("qwen3", {"num_hidden_layers": 0, "layer_types": ...}, "num_hidden_layers must be a whole number"),
        ("qwen3", {"num_hidden_layers": None, "layer_types": ...}, "NoneType"),
        ("qwen3", {"hidden_size": 0}, "hidden_size must be a whole number of at least 1 .got 0"),
        ("qwen3", {"vocab_size": "many"}, "'vocab_size' expected int, got str .value: 'many'"),
        ("qwen3", {"vocab_size": 61.0}, "'vocab_size' expected int, got float .value: 61.0"),
        ("qwen3", {"head_dim": None}, "'head_dim' expected int, got NoneType"),
        ("qwen2", {"head_dim": None}, "head_dim must be a whole number of at least 1 .got None"),
        ("qwen3", {"head_dim": 7}, "even rotary dimension.*head_dim.=7"),
        ("qwen3", {"tie_word_embeddings": None}, "'tie_word_embeddings' expected bool, got NoneType"),
        ("qwen3", {"rms_norm_eps": None}, "'rms_norm_eps' expected float, got NoneType"),
        ("llama", {"torch_dtype": "auto", "dtype": ...}, "transformers refuses it: AttributeError: .*auto"),
        ("llama", {"num_attention_heads": 5}, "hidden size .24. is not a multiple of .* attention heads .5."),
        ("qwen3-moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}, "norm_topk_prob True"),
        ("qwen3-moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is not supported; there are 4 experts"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no layer with experts is left"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_experts must be a whole number of at least 1 .got 0"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1 .got 0"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_in_one_line(write, name, changes, message):
    _refused(write(name, **changes), message)


@pytest.mark.parametrize("beside", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize(
    "rope_type, others",
    [
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}),
        ("dynamic", {"factor": 2.0}),
        ("linear", {"factor": 2.0}),
        ("longrope", {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "factor": 4.0}),
        ("proportional", {}),
        ("mrope", {"mrope_section": [1, 1, 1]}),
        ("su", {"factor": 2.0}),
    ],
)
def test_a_rotary_type_that_cannot_be_trained_is_named(write, name, rope_type, others, key, beside):
    scaling = {"rope_theta": ..., "rope_parameters": ..., **beside, "rope_scaling": {key: rope_type, **others}}
    _refused(write(name, **scaling), f"rope_type '{rope_type}' is not supported; supported are default and llama3")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn': .'factor'"),
        ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5"),
        ({"rope_parameters": {"rope_theta": "10000"}}, "rope_theta must be a positive number .got '10000'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number .got 0"),
        ({"rope_parameters": ..., "rope_theta": None}, "rope_theta must be a positive number .got None"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters .'full_attention'"),
        ({"rope_parameters": {**tiny.LLAMA3, "high_freq_factor": 3.0}}, "high_freq_factor 3.0 .* at 4"),
        ({"rope_parameters": {**tiny.LLAMA3, "factor": None}}, "NoneType|factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "Missing required keys.*low_freq_factor"),
        # left out, it is the model's number of positions, and a key outside has the last word
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 128}}, "original_max_position_embeddings 128"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, "original_max_position_embeddings 64"),
    ],
)
def test_rotary_values_that_cannot_be_trained_are_named(write, changes, message):
    _refused(write("qwen3", **changes), message)


def test_an_attention_that_the_engine_replaces_is_not_asked_for(write):
    """``transformers`` lets the caller's choice go before the file's, and the engine makes one."""
    assert read_hf_config(write("qwen3", attn_implementation="flash_attention_2")).model_type == "qwen3"


def test_a_folder_without_config(tmp_path):
    _refused(tmp_path, "no config.json there")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"llama"', b"\xff{}", b"[" * 100_000])
def test_what_is_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    _refused(tmp_path, "config.json: not (JSON|a JSON object)")


def test_a_folder_that_an_adapter_takes_elsewhere(write):
    folder = write()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    _refused(folder, "adapter_config.json: .* merge the adapter")


def test_a_type_is_not_guessed_from_the_folders_name(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    _refused(folder, "model_type None")


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (5, ..., [5]),
        ([5, 6], ..., [5, 6]),
        (None, ..., []),
        (..., ..., []),
        (5, {}, []),  # the file decides, whatever it says
        (5, {"eos_token_id": None}, []),
        (5, {"eos_token_id": []}, []),
        (5, {"eos_token_id": 7, "temperature": 0.6}, [7]),
        (5, {"eos_token_id": [7, 9]}, [7, 9]),
    ],
)
def test_a_response_ends_where_transformers_ends_it(tmp_path, config, generation, expected):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny.hf_config("llama")).save_pretrained(tmp_path)
    tiny.write_config(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").unlink()
    if generation is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_token_ids(tmp_path) == expected
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id or []
    assert (theirs if isinstance(theirs, list) else [theirs]) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "generation_config.json: not JSON"),
        ("[]", "generation_config.json: not a JSON object"),
        ('{"max_new_tokens": 0}', "transformers refuses it: .*max_new_tokens"),
        ('{"eos_token_id": "7"}', "eos_token_id must be a token id or a list of them .got '7'"),
        ('{"eos_token_id": [7, 7.5]}', "eos_token_id must be a token id or a list of them .got .7, 7.5"),
        ('{"eos_token_id": true}', "eos_token_id must be a token id or a list of them .got True"),
    ],
)
def test_a_generation_config_that_says_nothing_clear(tmp_path, text, message):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_eos_token_ids(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
