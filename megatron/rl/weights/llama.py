"""Llama, and what is built like it (SmolLM2): grouped-query attention and a gated MLP."""

from megatron.rl.weights import rows
from megatron.rl.weights.table import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rows=(
        rows.EMBEDDING,
        rows.INPUT_NORM,
        rows.QKV,
        rows.ATTENTION_OUT,
        rows.MLP_NORM,
        rows.MLP_IN,
        rows.MLP_OUT,
        rows.FINAL_NORM,
        rows.HEAD,
    ),
)
