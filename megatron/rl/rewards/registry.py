"""The rewards by name."""

import importlib.util
import json
from collections.abc import Callable, Sequence

from megatron.rl.config import RewardConfig
from megatron.rl.errors import RewardError
from megatron.rl.rewards.names import unknown_name
from megatron.rl.rewards.pool import WorkerPool
from megatron.rl.rewards.scorer import ExactScorer, Scorer
from megatron.rl.types import Prompt, RewardItem


def _exact(_: RewardConfig) -> Scorer:
    return ExactScorer()


def _in_workers(spec: str, module: str, package: str) -> Callable[[RewardConfig], Scorer]:
    """A reward whose function ``spec`` needs ``module``, which is installed as ``package``."""

    def make(config: RewardConfig) -> Scorer:
        if importlib.util.find_spec(module) is None:
            raise RewardError(f"reward {config.name} needs a package that is missing: pip install {package}")
        return WorkerPool(spec, workers=config.workers, timeout_s=config.timeout_s)

    return make


REWARDS: dict[str, Callable[[RewardConfig], Scorer]] = {
    "math-verify": _in_workers("megatron.rl.rewards.math_verify_scorer:score", "math_verify", "math-verify"),
    "exact": _exact,
    "reasoning-gym": _in_workers("megatron.rl.rewards.reasoning_gym_scorer:score", "reasoning_gym", "reasoning-gym"),
}


def make_scorer(config: RewardConfig) -> Scorer:
    """The scorer that ``config`` names, its workers started. Close it when done.

    Raises :class:`RewardError` for an unknown name, a missing package, no worker, or a deadline that is not positive.
    """
    if config.name not in REWARDS:
        raise RewardError(unknown_name("reward", config.name, REWARDS))
    if config.workers < 1:
        raise RewardError(f"scoring needs at least 1 worker process (got {config.workers})")
    if not config.timeout_s > 0:
        raise RewardError(f"the scoring deadline must be positive, in seconds (got {config.timeout_s})")
    return REWARDS[config.name](config)


def check_prompts(scorer: Scorer, prompts: Sequence[Prompt]) -> None:
    """Refuses problems that ``scorer`` cannot score, whatever the response, before any training.

    Every distinct problem is scored once, with its own answer as the response. Raises :class:`RewardError` that
    names the first one without a score.
    """
    distinct = {(p.answer, p.source, json.dumps(p.metadata, sort_keys=True)): p for p in reversed(prompts)}
    first_seen = sorted(distinct.values(), key=lambda prompt: prompt.index)
    results = scorer.score([RewardItem(prompt.answer, prompt) for prompt in first_seen])
    for prompt, result in zip(first_seen, results, strict=True):
        if result.status != "ok":
            raise RewardError(
                f"problem {prompt.index} (counted from 0), answer {prompt.answer[:60]!r}: no response to it can be "
                f"scored ({result.detail}); mend the prompt file or choose another reward"
            )
