"""From the ``transformers`` configuration of a checkpoint to Megatron's own arguments, and to its weight table."""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.rl.errors import ConfigError
from megatron.rl.weights import rows
from megatron.rl.weights.llama import LLAMA
from megatron.rl.weights.qwen2 import QWEN2
from megatron.rl.weights.qwen3 import QWEN3
from megatron.rl.weights.qwen3_moe import QWEN3_MOE
from megatron.rl.weights.table import Dimensions, Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
_SILU = ("silu", "swish")  # one function, two names
_FULL_ATTENTION = "every layer must have full attention"
# What no model of these families has, but a config.json may say, and transformers then acts on.
_FOREIGN = {
    "quantization_config": "use the bf16 or float32 weights",
    "text_config": "use a model of text alone",
    "decoder": "use a decoder-only model",
    "generator": "use a decoder-only model",
    "attention_chunk_size": _FULL_ATTENTION,
    "num_kv_shared_layers": "each layer must have its own keys and values",
    "fusion_config": "leave it out",
}
_OUTPUTS = {"return_dict": True, "output_attentions": False}  # with others, the model cannot sample


def megatron_arguments_from_hf(config: "PretrainedConfig") -> dict[str, object]:
    """The values that Megatron's arguments must have to compute what ``transformers`` computes from ``config``.

    ``config`` is what ``transformers`` made of config.json, so every default is already in it. Keys of the result are
    attribute names of Megatron's argparse namespace. Dropout is off: the policy that is trained must be the policy
    that is sampled from.

    Raises:
        ConfigError: an unsupported architecture, or a setting of it that the policy cannot reproduce.
    """
    family = family_of(config)
    _refuse_unsupported(config)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    arguments: dict[str, object] = {
        "num_layers": _integer(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": _integer(config, "intermediate_size"),
        "num_attention_heads": heads,
        "group_query_attention": True,
        "num_query_groups": _integer(config, "num_key_value_heads"),
        # not a field of every family; its attention takes this default itself
        "kv_channels": _integer(config, "head_dim") if hasattr(config, "head_dim") else hidden // heads,
        "vocab_size": _integer(config, "vocab_size"),
        "max_position_embeddings": _integer(config, "max_position_embeddings"),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.rms_norm_eps),
        "layernorm_zero_centered_gamma": False,
        "apply_residual_connection_post_layernorm": False,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
    }
    arguments.update(_rotary_arguments(config))
    arguments.update(family.arguments)
    if family.has_experts:
        arguments.update(_expert_arguments(config))
    return arguments


def check_model_type(model_type: object, where: str) -> None:
    """Refuses an architecture without a weight table. ``where`` names the file."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
        raise ConfigError(f"{where}: model_type {model_type!r} is not supported; supported are {supported}")


def family_of(config: "PretrainedConfig") -> Family:
    """The weight table of ``config``'s architecture, with the output head as the config ties it.

    Raises:
        ConfigError: an architecture without a table.
    """
    check_model_type(config.model_type, _where(config))
    family = FAMILIES[config.model_type]
    if not config.tie_word_embeddings:
        return family
    # The last pipeline stage holds a copy of the embedding; it is read from there and not exported twice.
    tied = dataclasses.replace(rows.HEAD, hf=rows.EMBEDDING.hf, exported=False)
    replaced = tuple(tied if row is rows.HEAD else row for row in family.rows)
    copies = {rows.HEAD.hf[0].name: rows.EMBEDDING.hf[0].name}
    return dataclasses.replace(family, rows=replaced, copies=copies)


def dimensions_of(config: "PretrainedConfig") -> Dimensions:
    """The sizes that the family's table refers to."""
    return Dimensions.from_arguments(megatron_arguments_from_hf(config))


def _where(config: "PretrainedConfig") -> str:
    return os.path.join(config.name_or_path or "", "config.json")


def _integer(config: "PretrainedConfig", name: str) -> int:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{_where(config)}: {name} must be a whole number of at least 1 (got {value!r})")
    return value


def _refuse(config: "PretrainedConfig", setting: str, value: object, need: str) -> ConfigError:
    return ConfigError(f"{_where(config)}: {setting} {value!r} is not supported; {need}")


def _refuse_unsupported(config: "PretrainedConfig") -> None:
    for name, need in _FOREIGN.items():
        value = getattr(config, name, None)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else None
            raise _refuse(config, name, method or value, need)
    for name, needed in _OUTPUTS.items():
        if bool(getattr(config, name)) is not needed:
            raise _refuse(config, name, getattr(config, name), "leave it out")
    if config.hidden_act not in _SILU:
        raise _refuse(config, "hidden_act", config.hidden_act, "the gated MLP uses silu")
    for name in ("attention_bias", "mlp_bias"):
        # A key that is no field of the family's class is not read by its model: Qwen2 has its biases either way.
        if hasattr(type(config), name) and getattr(config, name):
            raise _refuse(config, name, getattr(config, name), "use a model without it")
    pad, vocab = config.pad_token_id, _integer(config, "vocab_size")
    if pad is not None and not -vocab <= pad < vocab:
        raise _refuse(config, "pad_token_id", pad, f"it must be below vocab_size {vocab}, or left out")
    _refuse_windows(config)


def _refuse_windows(config: "PretrainedConfig") -> None:
    """Sliding windows, of the attention or of the engine's cache.

    Qwen2 and Qwen3 name a window even where no layer uses it; transformers decides by ``layer_types``, which it fills.
    In the other families a window that is on acts on every layer's mask or cache, whatever ``layer_types`` says.
    """
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if windowed:
        raise _refuse(config, "layer_types", min(windowed), _FULL_ATTENTION)
    window = getattr(config, "sliding_window", None)
    if window is not None and not hasattr(type(config), "layer_types"):
        raise _refuse(config, "sliding_window", window, _FULL_ATTENTION)


def _rotary_arguments(config: "PretrainedConfig") -> dict[str, object]:
    """Of the one dictionary that transformers makes of rope_scaling, rope_parameters, rope_theta and their like."""
    parameters = config.rope_parameters
    if config.nested_rope_parameter_keys(parameters):
        raise _refuse(config, "rope_parameters", parameters, "all layers must rotate alike")
    rope_type = parameters["rope_type"]
    if rope_type not in ("default", "llama3"):
        raise _refuse(config, "rope_type", rope_type, "supported are default and llama3")
    base = _number(config, parameters, "rope_theta")
    if base != int(base):
        raise _refuse(config, "rope_theta", base, "Megatron takes whole numbers")
    share = parameters.get("partial_rotary_factor")
    if share not in (None, 1):
        raise _refuse(config, "partial_rotary_factor", share, "the whole head is rotated")
    arguments: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
    }
    if rope_type == "llama3":
        arguments.update(_llama3_scaling(config, parameters))
    return arguments


def _llama3_scaling(config: "PretrainedConfig", parameters: Mapping[str, Any]) -> dict[str, object]:
    """Megatron fixes all of Llama 3's scaling but its factor."""
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    for name, value in fixed.items():
        if parameters.get(name) != value:
            found = parameters.get(name)
            raise _refuse(config, f"llama3 rope scaling with {name}", found, f"Megatron fixes it at {value}")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(_number(config, parameters, "factor"))}


def _number(config: "PretrainedConfig", parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigError(f"{_where(config)}: {name} must be a positive number (got {value!r})")
    return value


def _expert_arguments(config: "PretrainedConfig") -> dict[str, object]:
    layers = _integer(config, "num_hidden_layers")
    step = _integer(config, "decoder_sparse_step")
    dense = set(config.mlp_only_layers)
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(pattern):
        raise _refuse(config, "mlp_only_layers", sorted(dense), "no layer with experts is left")
    experts, top_k = _integer(config, "num_experts"), _integer(config, "num_experts_per_tok")
    if top_k > experts:
        raise _refuse(config, "num_experts_per_tok", top_k, f"there are {experts} experts")
    # Dividing the k largest of a softmax by their sum is the softmax over their logits: Megatron's default. Without
    # the division the weights are the softmax over all experts: Megatron's pre-softmax.
    renormalised = config.norm_topk_prob
    if renormalised and top_k == 1:
        raise _refuse(
            config, "norm_topk_prob", True, "with one expert per token its weight is always 1: set it to false"
        )
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": _integer(config, "moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
        "moe_router_topk": top_k,
        "moe_router_pre_softmax": not renormalised,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "moe_expert_capacity_factor": None,
        "moe_shared_expert_intermediate_size": None,
    }
