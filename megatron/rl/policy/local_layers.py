"""Transformer layers without Transformer Engine, for CPUs and for GPUs that lack it.

They are megatron-core's local layers, with the two pieces it lacks: an RMSNorm that accepts sequence
parallelism, and an attention core (``local_attention``) for packed sequences and context parallelism.
"""

import dataclasses

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules, get_mlp_module_spec_for_backend
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from megatron.rl.policy.local_attention import LocalCoreAttention


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, computed in float32, whose weight may be sequence-parallel.

    Megatron sums the gradients of weights marked ``sequence_parallel`` over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(f"the local layers have RMSNorm only (got {config.normalization})")
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] to the same shape and dtype."""
        normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normed.to(x.dtype)


class LocalLayersProvider(LocalSpecProvider):
    """megatron-core's local layers with an RMSNorm and an attention core of our own."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return LocalRMSNorm

    def core_attention(self) -> type:
        return LocalCoreAttention


def local_block_spec(
    config: TransformerConfig, backend: LocalSpecProvider, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or mixture-of-experts as ``config.moe_layer_freq`` says."""
    specs = {is_moe: _layer_spec(config, backend, is_moe) for is_moe in _moe_pattern(config)}
    layers = [specs[is_moe] for is_moe in _moe_pattern(config)]
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers[offset : offset + count], layer_norm=backend.layer_norm())


def _moe_pattern(config: TransformerConfig) -> list[bool]:
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, int):
        return [i % config.moe_layer_freq == 0 for i in range(config.num_layers)]
    return [bool(flag) for flag in config.moe_layer_freq]


def _layer_spec(config: TransformerConfig, backend: LocalSpecProvider, is_moe: bool) -> ModuleSpec:
    base = get_gpt_layer_local_submodules(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    norm = backend.layer_norm()
    attention = base.self_attention
    attention.submodules = dataclasses.replace(
        attention.submodules,
        linear_qkv=backend.column_parallel_linear(),
        linear_proj=backend.row_parallel_linear(),
        core_attention=backend.core_attention(),
        **({"q_layernorm": norm, "k_layernorm": norm} if config.qk_layernorm else {}),
    )
    mlp = get_mlp_module_spec_for_backend(
        backend=backend, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=False
    )
    submodules = dataclasses.replace(base, input_layernorm=norm, pre_mlp_layernorm=norm, mlp=mlp)
    return ModuleSpec(module=TransformerLayer, submodules=submodules)
