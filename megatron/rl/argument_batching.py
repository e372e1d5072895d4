"""From flags to how mini-batches are cut into micro-batches, by rows or by tokens, and what lengths are padded to."""

import argparse
import math

from megatron.rl.config import BatchingConfig
from megatron.rl.errors import ConfigError

# Tokens of a GEMM operand to a multiple of which FP8 recipes are made; others than these take 16.
_FP8_ALIGNMENT = {"mxfp8": 32, "blockwise": 128}


def total_multiple(args: argparse.Namespace) -> int:
    """Tokens to a multiple of which a row, or a pack, is padded: what a rank multiplies is aligned for FP8's GEMMs.

    That is its context-parallel share, two chunks of each sequence; sequence parallelism slices it evenly, and gathers
    it again before a GEMM.
    """
    aligned = _FP8_ALIGNMENT.get(args.fp8_recipe, 16) if args.fp8 else 1
    slices = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return math.lcm(args.context_parallel_size * math.lcm(slices, aligned), sequence_multiple(args))


def sequence_multiple(args: argparse.Namespace) -> int:
    """Tokens to a multiple of which each packed sequence is padded."""
    return 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1


def fill_token_budget(args: argparse.Namespace, explicit: set[str]) -> None:
    """Packing needs a budget; the default is what as many rows of full length would take."""
    if args.rl_use_sequence_packing and args.max_tokens_per_gpu is None:
        args.max_tokens_per_gpu = args.micro_batch_size * args.seq_length // args.context_parallel_size
        if "micro_batch_size" in explicit:  # Megatron demands 1 with packing, and then one pack is one full sequence
            args.max_tokens_per_gpu = args.seq_length // args.context_parallel_size
    if args.max_tokens_per_gpu is not None and "micro_batch_size" not in explicit:
        args.micro_batch_size = 1


def check_batching(args: argparse.Namespace, explicit: set[str]) -> None:
    """Raises :class:`ConfigError` for flags that contradict each other, or a budget that some sequence exceeds."""
    packing = args.rl_use_sequence_packing
    if args.max_tokens_per_gpu is None:
        return
    if args.micro_batch_size != 1 and "micro_batch_size" in explicit:
        chooser = "--rl-use-sequence-packing" if packing else "--max-tokens-per-gpu"
        raise ConfigError(
            f"--micro-batch-size {args.micro_batch_size} has no effect with {chooser}: micro-batches are cut "
            f"by tokens; leave it out, and set --max-tokens-per-gpu"
        )
    cp, multiple = args.context_parallel_size, total_multiple(args)
    capacity = args.max_tokens_per_gpu * cp // multiple * multiple
    longest = -(-(args.max_prompt_tokens + args.max_response_tokens) // multiple) * multiple
    if longest > capacity:
        raise ConfigError(
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} x context parallelism {cp} holds {capacity} tokens (in "
            f"multiples of {multiple}), fewer than --max-prompt-tokens {args.max_prompt_tokens} + "
            f"--max-response-tokens {args.max_response_tokens} can need, {longest}; give at least {longest // cp}"
        )


def batching_config(args: argparse.Namespace) -> BatchingConfig:
    """The resolved configuration; ``args.fp8`` must still hold the user's choice."""
    budget = args.max_tokens_per_gpu
    packing = args.rl_use_sequence_packing
    return BatchingConfig(
        micro_batch_size=args.micro_batch_size,
        token_budget=None if budget is None else budget * args.context_parallel_size,
        packed=packing,
        max_sequences_per_bin=args.rl_sequence_packing_max_sequences_per_bin if packing else None,
        sequence_multiple=sequence_multiple(args),
        total_multiple=total_multiple(args),
        count_multiple=_count_multiple(args),
        # This dispatcher gathers equally many tokens from every rank.
        uniform=bool(args.num_experts) and args.moe_token_dispatcher_type == "allgather",
    )


def _count_multiple(args: argparse.Namespace) -> int:
    """Interleaved pipelines run micro-batches in whole groups."""
    virtual = args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank
    if virtual is None or args.pipeline_model_parallel_size == 1:
        return 1
    return args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
