"""What a user can get wrong on the command line, said in one line before any work."""

import argparse
import os
from typing import TYPE_CHECKING

from megatron.rl.argument_batching import check_batching
from megatron.rl.argument_ranges import check_ranges
from megatron.rl.config import RunConfig
from megatron.rl.cpu_platform import is_cpu_platform
from megatron.rl.errors import ConfigError
from megatron.rl.fp8 import fp8_config_from_flags
from megatron.rl.objectives import get_objective

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_sizes(args: argparse.Namespace) -> None:
    """Numbers that later sums divide by, and folders."""
    check_ranges(args)
    for flag, folder in (("--save", args.save), ("--run-dir", args.run_dir)):
        if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"{flag} {folder}: a file is in the way; name a folder")


def check_before_megatron(args: argparse.Namespace, explicit: set[str]) -> None:
    """Flags and combinations that Megatron would refuse obscurely, or silently ignore."""
    if args.transformer_impl != "local" and is_cpu_platform():
        raise ConfigError("--transformer-impl transformer_engine needs a GPU; leave it out on a CPU")
    if args.distributed_backend == "nccl" and is_cpu_platform():
        raise ConfigError("--distributed-backend nccl needs GPUs; leave it out on a CPU, gloo is chosen")
    if args.train_prompts is None:
        raise ConfigError("--hf-model without prompts; name a JSONL file with --train-prompts FILE")
    for flag, path in (("--train-prompts", args.train_prompts), ("--eval-prompts", args.eval_prompts)):
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{flag} {path}: no such file")
    if args.fp8 and args.transformer_impl == "local":
        fp8_config_from_flags(args.fp8, args.fp8_recipe)
    _check_layout(args)
    _check_recomputation(args)
    _check_schedules(args)
    _check_batches(args)
    _check_sequence_length(args, explicit)
    check_batching(args, explicit)


def _check_layout(args: argparse.Namespace) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep, world = args.expert_model_parallel_size, args.world_size
    if world % (tp * pp * cp):
        raise ConfigError(
            f"{world} process(es) cannot hold a layout of tensor {tp} x pipeline {pp} x context {cp}; "
            f"start a multiple of {tp * pp * cp} (torchrun --nproc-per-node)"
        )
    for flag, size, what, whole in (
        ("--tensor-model-parallel-size", tp, "attention heads", args.num_attention_heads),
        ("--tensor-model-parallel-size", tp, "key-value groups", args.num_query_groups),
        ("--tensor-model-parallel-size", tp, "feed-forward units", args.ffn_hidden_size),
        ("--expert-model-parallel-size", ep, "experts", args.num_experts or 1),
        ("--pipeline-model-parallel-size", pp, "layers", None if _is_uneven(args) else args.num_layers),
    ):
        if whole and whole % size:
            raise ConfigError(f"{flag} {size} does not divide the model's {whole} {what}")
    etp = args.expert_tensor_parallel_size or tp
    if world % (etp * ep * pp):
        raise ConfigError(
            f"{world} process(es) cannot hold experts over expert {ep} x expert-tensor {etp} x pipeline {pp}; "
            f"start a multiple of {etp * ep * pp}, or set --expert-tensor-parallel-size"
        )
    if args.num_experts and etp > 1 and is_cpu_platform() and args.moe_token_dispatcher_type != "allgather":
        raise ConfigError(
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} cannot run with expert tensor parallelism "
            f"{etp} on CPUs; use allgather, or --expert-tensor-parallel-size 1"
        )
    if args.moe_token_dispatcher_type == "flex" and etp * ep == 1:
        raise ConfigError(
            "--moe-token-dispatcher-type flex needs experts that are shared out (--expert-model-parallel-size or "
            "--expert-tensor-parallel-size above 1); use alltoall"
        )
    if cp > 1 and args.transformer_impl == "local" and not is_cpu_platform():
        raise ConfigError(
            f"--context-parallel-size {cp} on GPUs needs Transformer Engine; "
            "install it, or use --context-parallel-size 1"
        )


def _is_uneven(args: argparse.Namespace) -> bool:
    """Whether the layers of the pipeline's stages are given one by one; Megatron checks what comes of it."""
    return (
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.pipeline_model_parallel_layout is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    )


def _check_schedules(args: argparse.Namespace) -> None:
    """What Megatron's schedules assert without a word."""
    length = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters >= length:
        raise ConfigError(
            f"--lr-warmup-iters {args.lr_warmup_iters} must be below --lr-decay-iters, which is {length} "
            "(--train-iters where it is left out)"
        )
    for flag, value in (("--min-lr", args.min_lr), ("--lr-warmup-init", args.lr_warmup_init)):
        if value > args.lr:
            raise ConfigError(f"{flag} {value} is above --lr {args.lr}")
    if args.decoupled_lr is not None and (args.decoupled_min_lr or 0) > args.decoupled_lr:
        raise ConfigError(f"--decoupled-min-lr {args.decoupled_min_lr} is above --decoupled-lr {args.decoupled_lr}")
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ConfigError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the optimizer steps of its last phase")
    if args.weight_decay_incr_style != "constant":
        start, end = args.start_weight_decay, args.end_weight_decay
        if start is None or end is None or start > end:
            raise ConfigError(
                f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and an "
                f"--end-weight-decay that is not below it (got {start} and {end})"
            )


def _check_recomputation(args: argparse.Namespace) -> None:
    """Some of Megatron's modules are recomputed by a function that asks Transformer Engine about FP8."""
    needing = sorted({"layernorm", "moe_act", "mla_up_proj"}.intersection(args.recompute_modules or ()))
    if args.recompute_granularity == "selective" and args.transformer_impl == "local" and needing:
        raise ConfigError(
            f"--recompute-modules {' '.join(needing)} needs Transformer Engine's layers; use core_attn, mlp or moe, or "
            "--recompute-granularity full"
        )


def _check_batches(args: argparse.Namespace) -> None:
    batch = args.grpo_prompts_per_step * args.grpo_group_size
    if batch % args.global_batch_size:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} (responses of one optimizer step) does not divide the "
            f"rollout batch of {args.grpo_prompts_per_step} prompts x {args.grpo_group_size} responses = {batch}"
        )
    dp = args.world_size // (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    if args.global_batch_size % dp:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} (responses of one optimizer step) is not a multiple of the "
            f"{dp} data-parallel ranks, as Megatron has it; choose batches of a multiple of {dp} responses"
        )
    if args.global_batch_size % (dp * args.micro_batch_size):
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {dp} data-parallel rank(s)"
        )
    per_step = batch * args.grpo_iterations // args.global_batch_size
    if args.train_iters % per_step:
        raise ConfigError(
            f"--train-iters {args.train_iters} (optimizer steps) is not a multiple of the {per_step} steps taken on "
            f"each rollout batch; use {max(per_step, args.train_iters // per_step * per_step)}"
        )
    for flag, interval in (
        ("--eval-interval", args.eval_interval),
        ("--save-interval", args.save_interval),
        ("--exit-interval", args.exit_interval),
    ):
        if interval is not None and interval % per_step:
            raise ConfigError(
                f"{flag} {interval} (optimizer steps) is not a multiple of the {per_step} steps taken on each rollout "
                f"batch; use {max(per_step, interval // per_step * per_step)}"
            )
    if args.save_retain_interval is not None and args.save_retain_interval % args.save_interval:
        raise ConfigError(
            f"--save-retain-interval {args.save_retain_interval} is not a multiple of --save-interval "
            f"{args.save_interval}"
        )


def _check_sequence_length(args: argparse.Namespace, explicit: set[str]) -> None:
    """Rows are as long as their longest response; only Megatron's packing reads a length."""
    needed = args.max_prompt_tokens + args.max_response_tokens
    if args.seq_length < needed:
        raise ConfigError(
            f"--seq-length {args.seq_length} is shorter than --max-prompt-tokens {args.max_prompt_tokens} + "
            f"--max-response-tokens {args.max_response_tokens}; leave --seq-length out"
        )
    decides = args.rl_use_sequence_packing and "max_tokens_per_gpu" not in explicit
    if "seq_length" in explicit and not decides and args.seq_length != needed:
        raise ConfigError(
            f"--seq-length {args.seq_length} has no effect: rows are as long as their longest response; set "
            f"--max-prompt-tokens and --max-response-tokens ({needed} together), or --max-tokens-per-gpu"
        )


def check_run(run: RunConfig, hf_config: "PretrainedConfig") -> None:
    """What needs the resolved configuration: the objective's own checks, and the model's position limit."""
    objective = run.objective
    chosen = get_objective(
        objective.name,
        delta=objective.delta,
        eps=objective.eps,
        eps_low=objective.eps_low,
        eps_high=objective.eps_high,
        advantage_weight=objective.advantage_weight,
    )
    if chosen.needs == "candidates":
        raise ConfigError(
            f"--loss {objective.name} needs the behaviour's most probable tokens, which the rollout engine does not "
            "give yet; use --loss drpo, or the loss itself from megatron.rl.ops"
        )
    limit = hf_config.max_position_embeddings
    wanted = run.data.max_prompt_tokens + run.data.max_response_tokens
    if wanted > limit:
        raise ConfigError(
            f"--max-prompt-tokens {run.data.max_prompt_tokens} + --max-response-tokens {run.data.max_response_tokens} "
            f"= {wanted} exceeds the model's {limit} positions; lower one of them"
        )
