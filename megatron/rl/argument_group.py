"""The flags that Megatron lacks."""

import argparse

from megatron.rl.objectives import OBJECTIVES

# drpo-topk needs the behaviour's most probable tokens, which no rollout engine here gives.
_LOSSES = [name for name in OBJECTIVES if name != "drpo-topk"]


def add_rl_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags that Megatron lacks; those it has (``--grpo-*``, ``--rl-*``, ``--fp8-*``) keep their meaning."""
    group = parser.add_argument_group("drpo", "policy-gradient training with DRPO (arXiv 2606.09821) and its relatives")
    add = group.add_argument
    add("--loss", default="drpo", help=f"objective that is maximised: {', '.join(_LOSSES)}")
    add("--loss-delta", type=float, default=12.5, help="trust-region size delta of drpo, dppo, kl, k3, tv and mask-*")
    add("--loss-eps", type=float, default=0.2, help="ratio bound of spo")
    add(
        "--no-loss-advantage-weight",
        action="store_false",
        dest="loss_advantage_weight",
        help="do not weight the regulariser by abs(advantage)",
    )
    add(
        "--loss-normalization",
        default="seq-mean-token-sum-norm",
        choices=["seq-mean-token-sum-norm", "token-mean"],
        help="token sum over a fixed horizon then mean over sequences, or mean over all tokens",
    )
    add("--loss-horizon", type=int, help="tokens; divisor of seq-mean-token-sum-norm (default: the response limit)")
    add("--token-chunk", type=int, help="tokens whose logits exist at a time in the loss (default: chosen by size)")
    add(
        "--max-tokens-per-gpu",
        type=int,
        metavar="N",
        help="tokens of a micro-batch on one GPU, which then decide the cut instead of --micro-batch-size; with "
        "context parallelism a micro-batch holds as many times more (packing has a default)",
    )
    add(
        "--no-use-distributed-optimizer",
        action="store_false",
        dest="use_distributed_optimizer",
        help="keep every optimizer state on every data-parallel rank (default: shared out among them)",
    )
    add("--advantage-std", action="store_true", help="divide advantages by the group's standard deviation")
    add("--advantage-leave-one-out", action="store_true", help="baseline from the other responses of the group")
    add(
        "--unscored-responses",
        default="zero",
        choices=["zero", "exclude"],
        help="a response whose scoring timed out or failed counts as score 0, or is left out of its group's baseline",
    )
    add("--hf-model", metavar="DIR", help="Hugging Face checkpoint folder (default: the bundled tiny model)")
    add("--train-prompts", metavar="FILE", help="JSONL of problems (default: the bundled arithmetic)")
    add(
        "--eval-prompts",
        metavar="FILE",
        help="held-out JSONL (default: the bundled one with bundled prompts, else none)",
    )
    add("--max-prompt-tokens", type=int, help="longest prompt (default: 2048, bundled model 16)")
    add("--max-response-tokens", type=int, help="longest response (default: 8192, bundled model 8)")
    add(
        "--overlong-prompts",
        default="error",
        choices=["error", "skip"],
        help="a prompt over the limit stops the run, or is skipped and counted",
    )
    add(
        "--unscorable-prompts",
        default="keep",
        choices=["keep", "skip"],
        help="problems whose own right answer does not score 1 are told at the start, and kept or skipped",
    )
    add("--apply-chat-template", action="store_true", help="send plain-text prompts through the chat template too")
    add("--reward", default="math-verify", help="math-verify, exact or reasoning-gym")
    add("--reward-workers", type=int, default=1, help="scoring processes of each rank")
    add("--reward-timeout", type=float, default=5.0, help="seconds until the scoring of one response is given up")
    add(
        "--rollout-engine",
        default="hf",
        choices=["hf", "vllm", "sglang"],
        help="hf: transformers inside the trainer's processes; vllm, sglang: servers, one started here or joined",
    )
    add("--rollout-url", metavar="URL[,URL...]", help="servers to join, or a router before them (default: start one)")
    add("--rollout-server-args", metavar="ARGS", help="further arguments of the server that is started, in one string")
    add(
        "--weight-sync-dir",
        metavar="DIR",
        help="folder through which servers get the weights, which all of them see under this path (default: in shared "
        "memory, or in the run folder where that is too small)",
    )
    add("--eval-samples", type=int, default=4, help="responses per problem in evaluation")
    add("--run-dir", metavar="DIR", default="runs/latest", help="metrics, plots, checkpoints and the export go here")
    return parser
