"""Megatron's arguments from config.json: names that its parser has, values that give the same arithmetic."""

import argparse

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.weights import megatron_arguments_from_hf
from tests.unit_tests.rl.weights import tiny


def _config(name="qwen3-moe", **changes):
    config = {**tiny.hf_config(name).to_dict(), **changes}
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("name", tiny.CHECKPOINTS)
def test_every_name_is_an_argument_of_megatron(name):
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    actions = {action.dest: action for action in parser._actions}
    for argument, value in megatron_arguments_from_hf(_config(name)).items():
        action = actions[argument]
        assert action.choices is None or value in action.choices
        if action.type in (int, float) and value is not None:
            assert type(value) is action.type, argument


def test_values_of_a_hub_config():
    """Qwen3-30B-A3B's config.json, as the hub has it (written by transformers 4)."""
    arguments = megatron_arguments_from_hf(
        {
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
    )
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


def test_head_size_and_groups_have_the_defaults_of_transformers():
    arguments = megatron_arguments_from_hf(_config("llama", head_dim=..., num_key_value_heads=...))
    assert (arguments["kv_channels"], arguments["num_query_groups"]) == (6, 4)


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({}, 1),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [1]}, [0, 0, 1, 0]),
    ],
)
def test_which_layers_have_experts(changes, pattern):
    assert megatron_arguments_from_hf(_config(**changes))["moe_layer_freq"] == pattern


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("experts, topk", [(7, 2), (7, 7), (64, 8)])
def test_router_weights_are_those_of_transformers(norm_topk_prob, experts, topk):
    """The softmax over the k largest logits is the softmax over all, divided by the sum of its k largest values."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = tiny.hf_config("qwen3-moe")
    config.num_experts, config.num_experts_per_tok, config.norm_topk_prob = experts, topk, norm_topk_prob
    router = Qwen3MoeTopKRouter(config)
    torch.manual_seed(3)
    torch.nn.init.normal_(router.weight, std=1.0)
    hidden = torch.randn(101, config.hidden_size)
    logits, weights, indices = router(hidden)
    arguments = megatron_arguments_from_hf(config.to_dict())
    probs, chosen = topk_routing_with_score_function(
        logits,
        arguments["moe_router_topk"],
        use_pre_softmax=arguments["moe_router_pre_softmax"],
        score_function=arguments["moe_router_score_function"],
        scaling_factor=arguments["moe_router_topk_scaling_factor"],
    )
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, indices, True))
    torch.testing.assert_close(probs.gather(1, indices), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen3", {"model_type": "gpt2"}, r"model_type 'gpt2' is not supported; supported are llama .LlamaForCausalLM"),
        ("qwen3", {"model_type": ...}, "model_type None is not supported"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types 'sliding_attention'"),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 7}, "use_sliding_window True"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn' is not supported"),
        ("qwen3", {"rope_parameters": ..., "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ("qwen3", {"rope_parameters": ...}, "rope_theta is missing"),
        ("qwen3", {"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5"),
        ("qwen3", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ("llama3", {"rope_parameters": {**tiny.LLAMA3, "high_freq_factor": 3.0}}, "high_freq_factor 3.0 .* at 4"),
        ("llama3", {"rope_parameters": {**tiny.LLAMA3, "factor": None}}, "factor is missing"),
        ("qwen3", {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ("qwen3", {"hidden_size": 0}, "hidden_size must be a whole number of at least 1 .got 0"),
        ("qwen3", {"vocab_size": "many"}, "vocab_size must be a whole number"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8'"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "norm_topk_prob True"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no layer with experts is left"),
        ("qwen3-moe", {"num_local_experts": ..., "num_experts": ...}, "num_experts is missing"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_in_one_line(name, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        megatron_arguments_from_hf(_config(name, **changes))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
