"""The output projection fused with log-probabilities and the policy gradient, parallel over the vocabulary.

No logits of the whole batch exist at any time, on any rank.
"""

from megatron.rl.ops.logprobs import LogprobOutput, fused_linear_logprobs
from megatron.rl.ops.loss_job import PolicyLossOutput
from megatron.rl.ops.policy_loss import fused_linear_policy_loss
from megatron.rl.ops.validation import TokenError

__all__ = ["LogprobOutput", "PolicyLossOutput", "TokenError", "fused_linear_logprobs", "fused_linear_policy_loss"]
