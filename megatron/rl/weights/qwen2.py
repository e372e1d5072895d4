"""Qwen2 (DeepSeek-R1-Distill-Qwen): Llama with a bias on queries, keys and values."""

from megatron.rl.weights import rows
from megatron.rl.weights.table import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rows=(
        rows.EMBEDDING,
        rows.INPUT_NORM,
        rows.QKV,
        rows.QKV_BIAS,
        rows.ATTENTION_OUT,
        rows.MLP_NORM,
        rows.MLP_IN,
        rows.MLP_OUT,
        rows.FINAL_NORM,
        rows.HEAD,
    ),
    arguments={"add_qkv_bias": True},
)
