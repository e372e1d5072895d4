"""The rows that decoder-only families share. A family file picks its own; nothing here knows of a family."""

from megatron.rl.weights.table import Fuse, HfTensor, Row, Shard, Where

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _layer_row(
    megatron: tuple[str, ...],
    hf: dict[str, tuple[str, ...]],
    shard: Shard = Shard.REPLICATED,
    where: Where = Where.EVERY_LAYER,
    fuse: Fuse = Fuse.NONE,
) -> Row:
    return Row(
        tuple(_LAYER + name for name in megatron),
        tuple(HfTensor(_HF_LAYER + name, shape) for name, shape in hf.items()),
        shard,
        where,
        fuse,
    )


EMBEDDING = Row(
    ("embedding.word_embeddings.weight",),
    (HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    Shard.COLUMN,
    Where.INPUT,
    Fuse.PAD_VOCAB,
)
FINAL_NORM = Row(
    ("decoder.final_layernorm.weight",), (HfTensor("model.norm.weight", ("hidden",)),), Shard.REPLICATED, Where.OUTPUT
)
HEAD = Row(
    ("output_layer.weight",),
    (HfTensor("lm_head.weight", ("vocab", "hidden")),),
    Shard.COLUMN,
    Where.OUTPUT,
    Fuse.PAD_VOCAB,
)

INPUT_NORM = _layer_row(
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), {"input_layernorm.weight": ("hidden",)}
)
QKV = _layer_row(
    ("self_attention.linear_qkv.weight",),
    {
        "self_attn.q_proj.weight": ("query", "hidden"),
        "self_attn.k_proj.weight": ("key", "hidden"),
        "self_attn.v_proj.weight": ("key", "hidden"),
    },
    Shard.COLUMN,
    fuse=Fuse.QKV,
)
QKV_BIAS = _layer_row(
    ("self_attention.linear_qkv.bias",),
    {
        "self_attn.q_proj.bias": ("query",),
        "self_attn.k_proj.bias": ("key",),
        "self_attn.v_proj.bias": ("key",),
    },
    Shard.COLUMN,
    fuse=Fuse.QKV,
)
QUERY_NORM = _layer_row(("self_attention.q_layernorm.weight",), {"self_attn.q_norm.weight": ("head_dim",)})
KEY_NORM = _layer_row(("self_attention.k_layernorm.weight",), {"self_attn.k_norm.weight": ("head_dim",)})
ATTENTION_OUT = _layer_row(
    ("self_attention.linear_proj.weight",), {"self_attn.o_proj.weight": ("hidden", "query")}, Shard.ROW
)
# Transformer Engine keeps the norm before a plain MLP in its first linear layer, that before experts by itself.
MLP_NORM = _layer_row(
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), {"post_attention_layernorm.weight": ("hidden",)}
)
MLP_IN = _layer_row(
    ("mlp.linear_fc1.weight",),
    {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    Shard.COLUMN,
    Where.DENSE_LAYER,
    Fuse.GATE_UP,
)
MLP_OUT = _layer_row(
    ("mlp.linear_fc2.weight",), {"mlp.down_proj.weight": ("hidden", "ffn")}, Shard.ROW, Where.DENSE_LAYER
)
ROUTER = _layer_row(
    ("mlp.router.weight",), {"mlp.gate.weight": ("experts", "hidden")}, Shard.REPLICATED, Where.MOE_LAYER
)
# The alternative of both expert rows is the grouped GEMM's: one weight an expert in a single module.
EXPERT_IN = _layer_row(
    ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
    {
        "mlp.experts.{expert}.gate_proj.weight": ("expert_ffn", "hidden"),
        "mlp.experts.{expert}.up_proj.weight": ("expert_ffn", "hidden"),
    },
    Shard.EXPERT_COLUMN,
    Where.MOE_LAYER,
    Fuse.GATE_UP,
)
EXPERT_OUT = _layer_row(
    ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
    {"mlp.experts.{expert}.down_proj.weight": ("hidden", "expert_ffn")},
    Shard.EXPERT_ROW,
    Where.MOE_LAYER,
)
