"""Builds the policy's GPTModel stage from a TransformerConfig and a choice of layers."""

from dataclasses import dataclass

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.rl.policy.local_layers import local_block_spec


@dataclass(frozen=True)
class ModelShape:
    """What a GPTModel needs beyond its TransformerConfig."""

    padded_vocab_size: int
    max_sequence_length: int
    tied_embeddings: bool
    rotary_base: float
    rotary_percent: float
    rope_scaling: bool = False  # Llama 3's
    rope_scaling_factor: float = 8.0


def build_gpt_model(
    config: TransformerConfig,
    shape: ModelShape,
    *,
    local_layers: LocalSpecProvider | None,
    pg_collection: ProcessGroupCollection,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """One stage of the policy, with ``local_layers``, or with Transformer Engine's where that is None."""
    if local_layers is not None:
        spec = local_block_spec(config, local_layers, vp_stage=vp_stage)
    elif config.num_moe_experts is not None:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
        )
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        rope_scaling=shape.rope_scaling,
        rope_scaling_factor=shape.rope_scaling_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
