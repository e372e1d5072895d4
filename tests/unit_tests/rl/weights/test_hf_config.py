"""Megatron's arguments from a configuration: names that its parser has, values that give the same arithmetic.

That they are the values of ``transformers``, whatever config.json says, is test_same_model's.
"""

import argparse

import pytest
import torch

from megatron.rl.weights import megatron_arguments_from_hf
from tests.unit_tests.rl.weights import tiny


def _config(name="qwen3-moe", **changes):
    from transformers import AutoConfig

    config = {**tiny.hf_config(name).to_dict(), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    return AutoConfig.for_model(**config)


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
    arguments = megatron_arguments_from_hf(config)
    probs, chosen = topk_routing_with_score_function(
        logits,
        arguments["moe_router_topk"],
        use_pre_softmax=arguments["moe_router_pre_softmax"],
        score_function=arguments["moe_router_score_function"],
        scaling_factor=arguments["moe_router_topk_scaling_factor"],
    )
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, indices, True))
    torch.testing.assert_close(probs.gather(1, indices), weights, rtol=1e-5, atol=1e-7)
