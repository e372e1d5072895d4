"""What a user can get wrong on the command line, said in one line before any work."""

import argparse
import math
import os
from typing import TYPE_CHECKING

from megatron.rl.argument_batching import check_batching
from megatron.rl.config import RunConfig
from megatron.rl.cpu_platform import is_cpu_platform
from megatron.rl.errors import ConfigError
from megatron.rl.fp8 import fp8_config_from_flags, refuse_unemulated_flags
from megatron.rl.objectives import get_objective

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Megatron's flags that this program does not act on: better refused than ignored.
_WITHOUT_EFFECT = {
    "data_path": "prompts come from --train-prompts",
    "train_data_path": "prompts come from --train-prompts",
    "train_samples": "use --train-iters, the number of optimizer steps",
    "langrl_env_config": "problems come from --train-prompts, their scorer from --reward",
    "rl_generation_lag": "rollouts are made by the current policy only",
    "rl_partial_rollouts": "rollouts are made by the current policy only",
    "rl_sequence_packing_algo": "packs are balanced over the ranks by their tokens",
    "rl_importance_sampling_truncation_coef": "the behaviour policy is the engine's own, uncorrected",
    "rl_inference_logprobs_is_correction": "the behaviour policy is the engine's own, uncorrected",
    "perform_rl_step": "this program is the RL step; leave the flag out",
    "step_batch_size_schedule": "the mini-batch has one size, --global-batch-size",
    "rampup_batch_size": "the mini-batch has one size, --global-batch-size",
    "mtp_num_layers": "multi-token prediction has no part in the policy's loss",
    "use_megatron_fsdp": "use --use-distributed-optimizer",
    "use_torch_fsdp2": "use --use-distributed-optimizer",
    "async_save": "a checkpoint is complete before the run goes on",
    "fp16": "use --bf16, or neither for float32",
    "yaml_cfg": "give the flags on the command line",
}


def check_sizes(args: argparse.Namespace) -> None:
    """Sizes that later sums divide by."""
    positive = {
        "--grpo-group-size": args.grpo_group_size,
        "--grpo-prompts-per-step": args.grpo_prompts_per_step,
        "--grpo-iterations": args.grpo_iterations,
        "--train-iters": args.train_iters,
        "--max-prompt-tokens": args.max_prompt_tokens,
        "--max-response-tokens": args.max_response_tokens,
        "--eval-samples": args.eval_samples,
        "--rl-prompts-per-eval": args.rl_prompts_per_eval,
        "--tensor-model-parallel-size": args.tensor_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
        "--context-parallel-size": args.context_parallel_size,
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--global-batch-size": args.global_batch_size,
        "--micro-batch-size": args.micro_batch_size,
        "--reward-workers": args.reward_workers,
        "--max-tokens-per-gpu": args.max_tokens_per_gpu,
        "--rl-sequence-packing-max-sequences-per-bin": args.rl_sequence_packing_max_sequences_per_bin,
        "--token-chunk": args.token_chunk,
        "--loss-horizon": args.loss_horizon,
    }
    for flag, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be at least 1 (got {value})")
    if args.grpo_group_size < 2:
        raise ConfigError(
            "--grpo-group-size must be at least 2: the advantage is a response's reward minus its group's mean, "
            f"which is zero in a group of one (got {args.grpo_group_size})"
        )
    if not 0 < args.lr < math.inf:
        raise ConfigError(f"--lr must be a positive number (got {args.lr})")
    if args.seed < 1:
        raise ConfigError(f"--seed must be at least 1 (got {args.seed})")
    if args.optimizer != "adam":
        raise ConfigError(f"--optimizer must be adam (got {args.optimizer})")
    if not 0.1 <= args.reward_timeout < math.inf:
        raise ConfigError(f"--reward-timeout must be at least 0.1 seconds (got {args.reward_timeout})")
    for flag, folder in (("--save", args.save), ("--run-dir", args.run_dir)):
        if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
            raise ConfigError(f"{flag} {folder}: a file is in the way; name a folder")
    if not 0 < args.rl_default_temperature < math.inf:
        raise ConfigError(
            f"--rl-default-temperature must be positive: training samples (got {args.rl_default_temperature})"
        )


def check_before_megatron(args: argparse.Namespace, explicit: set[str]) -> None:
    """Flags and combinations that Megatron would refuse obscurely, or silently ignore."""
    for name, reason in _WITHOUT_EFFECT.items():
        if name in explicit and getattr(args, name) not in (None, False, 0):
            raise ConfigError(f"--{name.replace('_', '-')} has no effect here: {reason}")
    if args.rl_default_top_p not in (0, 1) or args.rl_default_top_k > 0:
        raise ConfigError(
            "--rl-default-top-p and --rl-default-top-k truncate the behaviour policy, and the trainer's policy is not "
            f"truncated with it; leave them out (got {args.rl_default_top_p} and {args.rl_default_top_k})"
        )
    if args.grpo_kl_beta:
        raise ConfigError(
            f"--grpo-kl-beta needs a reference model, and there is none here; use 0 (got {args.grpo_kl_beta})"
        )
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
        refuse_unemulated_flags(explicit)
    _check_rollout(args)
    _check_layout(args)
    _check_recomputation(args)
    _check_batches(args)
    check_batching(args, explicit)


def _check_rollout(args: argparse.Namespace) -> None:
    if args.rollout_engine == "hf":
        for name in ("rollout_url", "rollout_server_args", "weight_sync_dir"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for servers; add --rollout-engine vllm or --rollout-engine sglang"
                )
    if args.rollout_url is not None and args.rollout_server_args is not None:
        raise ConfigError("--rollout-server-args has no effect with --rollout-url: no server is started")


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
        ("--pipeline-model-parallel-size", pp, "layers", args.num_layers),
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
    if cp > 1 and args.transformer_impl == "local" and not is_cpu_platform():
        raise ConfigError(
            f"--context-parallel-size {cp} on GPUs needs Transformer Engine; "
            "install it, or use --context-parallel-size 1"
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
    for flag, interval in (("--eval-interval", args.eval_interval), ("--save-interval", args.save_interval)):
        if interval is not None and (interval < 1 or interval % per_step):
            raise ConfigError(
                f"{flag} {interval} (optimizer steps) is not a multiple of the {per_step} steps taken on each rollout "
                f"batch; use {max(per_step, interval // per_step * per_step)}"
            )
    if args.seq_length < args.max_prompt_tokens + args.max_response_tokens:
        raise ConfigError(
            f"--seq-length {args.seq_length} is shorter than --max-prompt-tokens {args.max_prompt_tokens} + "
            f"--max-response-tokens {args.max_response_tokens}; leave --seq-length out"
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
