"""Qwen3: Llama with a norm on each query and key head."""

from megatron.rl.weights import rows
from megatron.rl.weights.table import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rows=(
        rows.EMBEDDING,
        rows.INPUT_NORM,
        rows.QKV,
        rows.QUERY_NORM,
        rows.KEY_NORM,
        rows.ATTENTION_OUT,
        rows.MLP_NORM,
        rows.MLP_IN,
        rows.MLP_OUT,
        rows.FINAL_NORM,
        rows.HEAD,
    ),
    arguments={"qk_layernorm": True},
)
