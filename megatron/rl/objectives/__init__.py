"""Per-token objectives of reinforcement learning: DRPO (arXiv 2606.09821) and its relatives.

Pure element-wise functions of (logp, logmu, advantage): no model, no process group, no sequence.
"""

from megatron.rl.objectives.diagnostics import TokenDiagnostics, token_diagnostics
from megatron.rl.objectives.registry import OBJECTIVES, Objective, get_objective

__all__ = ["OBJECTIVES", "Objective", "TokenDiagnostics", "get_objective", "token_diagnostics"]
