"""Scores for responses, by name, with a hard deadline for each. Imports no torch: the workers start from here."""

from megatron.rl.rewards.prompt_check import check_share, unscorable
from megatron.rl.rewards.registry import REWARDS, make_scorer
from megatron.rl.rewards.scorer import Scorer

__all__ = ["REWARDS", "Scorer", "check_share", "make_scorer", "unscorable"]
