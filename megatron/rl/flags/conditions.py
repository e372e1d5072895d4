"""Conditions under which alone some flags act, as the tables name them. They read the resolved arguments."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron.rl.cpu_platform import is_cpu_platform
from megatron.rl.objectives import UNWEIGHTED, parameters_of

Arguments = argparse.Namespace


@dataclass(frozen=True)
class Condition:
    """What must be so, in words that follow "without", and whether it is."""

    words: str
    holds: Callable[[Arguments], bool]


def _above_one(flag: str, name: str) -> Condition:
    return Condition(f"{flag} above 1", lambda args: getattr(args, name) > 1)


def _switched_on(flag: str, name: str) -> Condition:
    return Condition(flag, lambda args: bool(getattr(args, name)))


def _loss_reads(parameter: str, words: str) -> Condition:
    return Condition(words, lambda args: parameter in parameters_of(args.loss))


CONDITIONS: dict[str, Condition] = {
    # machine and layers
    "gpu": Condition("GPUs", lambda args: not is_cpu_platform()),
    "te": Condition("Transformer Engine's layers, on GPUs", lambda args: args.transformer_impl == "transformer_engine"),
    "experts": Condition("a model that has experts", lambda args: bool(args.num_experts)),
    "qk-norm": Condition("a model that has query and key norms", lambda args: args.qk_layernorm),
    # rollouts
    "servers": Condition(
        "servers (--rollout-engine vllm or --rollout-engine sglang)", lambda args: args.rollout_engine != "hf"
    ),
    "own-server": Condition(
        "a server that is started here (--rollout-engine vllm or sglang, no --rollout-url)",
        lambda args: args.rollout_engine != "hf" and args.rollout_url is None,
    ),
    # layout
    "tp": _above_one("--tensor-model-parallel-size", "tensor_model_parallel_size"),
    "pp": _above_one("--pipeline-model-parallel-size", "pipeline_model_parallel_size"),
    "cp": _above_one("--context-parallel-size", "context_parallel_size"),
    "vpp": Condition(
        "an interleaved pipeline (--num-layers-per-virtual-pipeline-stage)",
        lambda args: (
            args.num_layers_per_virtual_pipeline_stage is not None
            or args.num_virtual_stages_per_pipeline_rank is not None
            or args.pipeline_model_parallel_layout is not None
        ),
    ),
    "distributed-optimizer": Condition(
        "the distributed optimizer (leave --no-use-distributed-optimizer out)",
        lambda args: args.use_distributed_optimizer,
    ),
    "overlap": _switched_on("--overlap-grad-reduce", "overlap_grad_reduce"),
    # precision
    "bf16": _switched_on("--bf16", "bf16"),
    "bf16-gradients": _switched_on("--grad-reduce-in-bf16", "grad_reduce_in_bf16"),
    "scaler": Condition(
        "--bf16 or the distributed optimizer: a float32 optimizer of Megatron's has no loss scale, and applies what is "
        "not finite",
        lambda args: args.bf16 or args.use_distributed_optimizer,
    ),
    "fp8": _switched_on("--fp8-format", "fp8"),
    "fp8-delayed": Condition("--fp8-recipe delayed", lambda args: bool(args.fp8) and args.fp8_recipe == "delayed"),
    "bf16-layers": _switched_on("--first-last-layers-bf16", "first_last_layers_bf16"),
    # schedules
    "decay": Condition("an --lr-decay-style other than constant", lambda args: args.lr_decay_style != "constant"),
    "horizon": Condition(
        "an --lr-decay-style other than constant, or --lr-warmup-fraction",
        lambda args: args.lr_decay_style != "constant" or args.lr_warmup_fraction is not None,
    ),
    "wsd": Condition("--lr-decay-style WSD", lambda args: args.lr_decay_style == "WSD"),
    "warmup": Condition(
        "--lr-warmup-iters or --lr-warmup-fraction",
        lambda args: bool(args.lr_warmup_iters or args.lr_warmup_fraction),
    ),
    "decoupled": Condition("--decoupled-lr", lambda args: args.decoupled_lr is not None),
    "weight-decay-schedule": Condition(
        "--weight-decay-incr-style linear or cosine", lambda args: args.weight_decay_incr_style != "constant"
    ),
    "constant-weight-decay": Condition(
        "--weight-decay-incr-style constant (use --start-weight-decay and --end-weight-decay)",
        lambda args: args.weight_decay_incr_style == "constant",
    ),
    # recomputation
    "recompute-all": Condition("--recompute-granularity full", lambda args: args.recompute_granularity == "full"),
    "recompute-some": Condition(
        "--recompute-granularity selective",
        lambda args: args.recompute_granularity == "selective" or args.recompute_activations,
    ),
    # experts
    "flex": Condition("--moe-token-dispatcher-type flex", lambda args: args.moe_token_dispatcher_type == "flex"),
    # checkpoints
    "load": Condition("--load", lambda args: args.load is not None),
    "counters": Condition("--load without --finetune", lambda args: args.load is not None and not args.finetune),
    "optimizer-state": Condition(
        "an optimizer that goes on (--load, and neither --finetune nor --no-load-optim)",
        lambda args: args.load is not None and not args.finetune and not args.no_load_optim,
    ),
    # the loop
    "signal-handler": _switched_on("--exit-signal-handler", "exit_signal_handler"),
    "packing": _switched_on("--rl-use-sequence-packing", "rl_use_sequence_packing"),
    "held-out": Condition("held-out problems (--eval-prompts)", lambda args: args.eval_prompts is not None),
    "workers": Condition("a --reward that runs in workers (not exact)", lambda args: args.reward != "exact"),
    "loss-delta": _loss_reads("delta", "a --loss that has a delta (not pg, grpo, gspo or spo)"),
    "loss-eps": _loss_reads("eps", "--loss spo"),
    "loss-clip": _loss_reads("eps_low", "--loss grpo or gspo"),
    "loss-weight": Condition(
        f"a --loss with an advantage weight ({', '.join(UNWEIGHTED)})", lambda args: args.loss in UNWEIGHTED
    ),
    "loss-horizon": Condition(
        "--loss-normalization seq-mean-token-sum-norm",
        lambda args: args.loss_normalization == "seq-mean-token-sum-norm",
    ),
}
