"""Prompts, advantages, batches and the normalisation of the loss."""

from megatron.rl.data.advantages import GroupCounts, count_groups, group_advantages
from megatron.rl.data.batching import TokenBatch, collate, padded_length, split_for_rank
from megatron.rl.data.normalization import loss_weights
from megatron.rl.data.prompts import PromptSet, load_prompts
from megatron.rl.data.sampler import PromptSampler

__all__ = [
    "GroupCounts",
    "PromptSampler",
    "PromptSet",
    "TokenBatch",
    "collate",
    "count_groups",
    "group_advantages",
    "load_prompts",
    "loss_weights",
    "padded_length",
    "split_for_rank",
]
