"""What numbers the flags that act may have, said in one line before any work."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron.rl.errors import ConfigError


@dataclass(frozen=True)
class _Range:
    words: str  # that follow "must be"
    holds: Callable[[float], bool]


_AT_LEAST_1 = _Range("at least 1", lambda x: x >= 1)
_POSITIVE = _Range("a positive number", lambda x: 0 < x < math.inf)
_NOT_NEGATIVE = _Range("0 or a positive number", lambda x: 0 <= x < math.inf)
_BELOW_1 = _Range("0 or more, and below 1", lambda x: 0 <= x < 1)
_FINITE = _Range("a finite number", math.isfinite)
_RANGES: dict[str, _Range] = {
    **dict.fromkeys(
        (
            *("--grpo-prompts-per-step", "--grpo-iterations", "--train-iters", "--rl-prompts-per-eval"),
            *("--eval-samples", "--max-prompt-tokens", "--max-response-tokens", "--token-chunk", "--loss-horizon"),
            *("--global-batch-size", "--micro-batch-size", "--max-tokens-per-gpu", "--seq-length"),
            *("--rl-sequence-packing-max-sequences-per-bin", "--reward-workers", "--ckpt-step"),
            *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
            *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
            *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
            *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
            *("--ddp-num-buckets", "--ddp-bucket-size", "--distributed-timeout-minutes"),
            *("--make-vocab-size-divisible-by", "--mlp-chunks-for-training", "--recompute-num-layers"),
            *("--save-interval", "--save-retain-interval", "--eval-interval", "--exit-interval"),
            *("--exit-duration-in-mins", "--lr-decay-iters", "--lr-wsd-decay-iters"),
        ),
        _AT_LEAST_1,
    ),
    "--grpo-group-size": _Range(
        "at least 2: the advantage is a response's reward minus its group's mean, which is zero in a group of one",
        lambda x: x >= 2,
    ),
    "--seed": _Range("at least 1 and below 2^31", lambda x: 1 <= x < 2**31),
    "--reward-timeout": _Range("at least 0.1 seconds", lambda x: 0.1 <= x < math.inf),
    "--rl-default-temperature": _Range("positive: training samples", lambda x: 0 < x < math.inf),
    **dict.fromkeys(("--lr", "--decoupled-lr", "--loss-scale"), _POSITIVE),
    **dict.fromkeys(
        (
            *("--min-lr", "--decoupled-min-lr", "--lr-warmup-init", "--lr-warmup-iters", "--adam-eps"),
            *("--weight-decay", "--start-weight-decay", "--end-weight-decay", "--clip-grad", "--moe-z-loss-coeff"),
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("--adam-beta1", "--adam-beta2", "--lr-warmup-fraction"), _BELOW_1),
    "--grpo-entropy-term-weight": _FINITE,
}


def check_ranges(args: argparse.Namespace) -> None:
    """Raises :class:`ConfigError` for the first number that is out of its flag's range."""
    for flag, allowed in _RANGES.items():
        value = getattr(args, flag[2:].replace("-", "_"))
        if value is not None and not allowed.holds(value):
            raise ConfigError(f"{flag} must be {allowed.words} (got {value})")
