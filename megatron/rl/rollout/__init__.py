"""Rollout engines: the contract they share, the embedded one, sharing of work, and the check of mu at start."""

from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.hf import HFEngine

__all__ = ["HFEngine", "RolloutEngine"]
