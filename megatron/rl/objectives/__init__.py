"""Per-token objectives of reinforcement learning: DRPO (arXiv 2606.09821) and its relatives.

Pure functions of log-probabilities and advantages: no model, no process group.
"""

from megatron.rl.objectives.diagnostics import TokenDiagnostics, token_diagnostics
from megatron.rl.objectives.registry import (
    OBJECTIVES,
    TOKEN_OBJECTIVES,
    UNWEIGHTED,
    Objective,
    TokenObjective,
    get_objective,
    parameters_of,
)

__all__ = [
    "OBJECTIVES",
    "TOKEN_OBJECTIVES",
    "UNWEIGHTED",
    "Objective",
    "TokenDiagnostics",
    "TokenObjective",
    "get_objective",
    "parameters_of",
    "token_diagnostics",
]
