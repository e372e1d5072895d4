"""Qwen3-MoE: Qwen3 with routed experts in all or some layers."""

from megatron.rl.weights import rows
from megatron.rl.weights.table import Family

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
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
        rows.ROUTER,
        rows.EXPERT_IN,
        rows.EXPERT_OUT,
        rows.FINAL_NORM,
        rows.HEAD,
    ),
    arguments={"qk_layernorm": True},
    has_experts=True,
)
