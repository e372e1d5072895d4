"""Prompts, advantages, batches and the normalisation of the loss."""

from megatron.rl.data.advantages import GroupCounts, count_groups, group_advantages, trained_samples
from megatron.rl.data.batching import MicroBatcher, TokenBatch, collate, context_share
from megatron.rl.data.cutting import Cut, cut
from megatron.rl.data.normalization import loss_weights
from megatron.rl.data.prompts import PromptSet, load_prompts
from megatron.rl.data.sampler import PromptSampler

__all__ = [
    "Cut",
    "GroupCounts",
    "MicroBatcher",
    "PromptSampler",
    "PromptSet",
    "TokenBatch",
    "collate",
    "context_share",
    "count_groups",
    "cut",
    "group_advantages",
    "load_prompts",
    "loss_weights",
    "trained_samples",
]
