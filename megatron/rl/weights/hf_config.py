"""From a Hugging Face config.json to the values of Megatron's own arguments, and to the family's weight table."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.rl.errors import ConfigError
from megatron.rl.weights import rows
from megatron.rl.weights.llama import LLAMA
from megatron.rl.weights.qwen2 import QWEN2
from megatron.rl.weights.qwen3 import QWEN3
from megatron.rl.weights.qwen3_moe import QWEN3_MOE
from megatron.rl.weights.table import Dimensions, Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
_MISSING: Any = object()


def megatron_arguments_from_hf(config: Mapping[str, Any]) -> dict[str, object]:
    """The values that Megatron's arguments must have to compute what ``transformers`` computes from ``config``.

    Keys are attribute names of Megatron's argparse namespace. Dropout is off: the policy that is trained must be
    the policy that is sampled from.

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
        "num_query_groups": _integer(config, "num_key_value_heads", heads),
        "kv_channels": _integer(config, "head_dim", hidden // heads),
        "vocab_size": _integer(config, "vocab_size"),
        "max_position_embeddings": _integer(config, "max_position_embeddings"),
        "untie_embeddings_and_output_weights": not is_tied(config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(_value(config, "rms_norm_eps")),
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


def family_of(config: Mapping[str, Any]) -> Family:
    """The weight table of ``config``'s architecture, with the output head as the config ties it.

    Raises:
        ConfigError: an architecture without a table.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        supported = ", ".join(f"{family.model_type} ({family.architecture})" for family in FAMILIES.values())
        raise ConfigError(f"config.json: model_type {model_type!r} is not supported; supported are {supported}")
    family = FAMILIES[model_type]
    if not is_tied(config):
        return family
    # The last pipeline stage holds a copy of the embedding; it is read from there and not exported twice.
    tied = dataclasses.replace(rows.HEAD, hf=rows.EMBEDDING.hf, exported=False)
    replaced = tuple(tied if row is rows.HEAD else row for row in family.rows)
    copies = {rows.HEAD.hf[0].name: rows.EMBEDDING.hf[0].name}
    return dataclasses.replace(family, rows=replaced, copies=copies)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """The sizes that the family's table refers to."""
    return Dimensions.from_arguments(megatron_arguments_from_hf(config))


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output head is the embedding. All families here leave them apart unless the config says so."""
    return bool(config.get("tie_word_embeddings") or False)


def _value(config: Mapping[str, Any], name: str, default: Any = _MISSING) -> Any:
    value = config.get(name)
    if value is not None:
        return value
    if default is _MISSING:
        raise ConfigError(f"config.json: {name} is missing; take the config.json that came with the weights")
    return default


def _integer(config: Mapping[str, Any], name: str, default: int = _MISSING) -> int:
    value = _value(config, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} must be a whole number of at least 1 (got {value!r})")
    return value


def _refuse(setting: str, value: object, need: str) -> ConfigError:
    return ConfigError(f"config.json: {setting} {value!r} is not supported; {need}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act") != "silu":
        raise _refuse("hidden_act", config.get("hidden_act"), "the gated MLP uses silu")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise _refuse(name, config[name], "use a model without it")
    windowed = set(config.get("layer_types") or ()) - {"full_attention"}
    if windowed:
        raise _refuse("layer_types", min(windowed), "every layer must have full_attention")
    # Qwen configs name a window even where it is off; where it is on, layer_types may say that no layer has it.
    if config.get("use_sliding_window") and config.get("sliding_window") and not config.get("layer_types"):
        raise _refuse("use_sliding_window", True, "every layer must have full attention")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise _refuse("quantization_config", method, "use the bf16 or float32 weights")


def _rotary_arguments(config: Mapping[str, Any]) -> dict[str, object]:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = parameters.get("rope_theta", config.get("rope_theta"))
    if base is None:
        raise ConfigError("config.json: rope_theta is missing; take the config.json that came with the weights")
    if float(base) != int(base):
        raise _refuse("rope_theta", base, "Megatron takes whole numbers")
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1, 1.0):
        raise _refuse("partial_rotary_factor", share, "the whole head is rotated")
    arguments: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
    }
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "llama3":
        arguments.update(_llama3_scaling(parameters))
    elif rope_type != "default":
        raise _refuse("rope_type", rope_type, "supported are default and llama3")
    return arguments


def _llama3_scaling(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Megatron fixes all of Llama 3's scaling but its factor."""
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    for name, value in fixed.items():
        if parameters.get(name) != value:
            raise _refuse(f"llama3 rope scaling with {name}", parameters.get(name), f"Megatron fixes it at {value}")
    return {"use_rope_scaling": True, "rope_scaling_factor": float(_value(parameters, "factor"))}


def _expert_arguments(config: Mapping[str, Any]) -> dict[str, object]:
    layers = _integer(config, "num_hidden_layers")
    step = _integer(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)]
    if not any(pattern):
        raise _refuse("mlp_only_layers", sorted(dense), "no layer with experts is left")
    top_k = _integer(config, "num_experts_per_tok")
    # Dividing the k largest of a softmax by their sum is the softmax over their logits: Megatron's default. Without
    # the division the weights are the softmax over all experts: Megatron's pre-softmax.
    renormalised = bool(config.get("norm_topk_prob") or False)
    if renormalised and top_k == 1:
        raise _refuse("norm_topk_prob", True, "with one expert per token its weight is always 1: set it to false")
    return {
        # transformers 5 writes num_local_experts, the models on the hub have num_experts
        "num_experts": _integer(config, "num_local_experts" if "num_local_experts" in config else "num_experts"),
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
