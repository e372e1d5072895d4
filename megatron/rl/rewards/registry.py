"""The rewards by name."""

import importlib.util
from collections.abc import Callable

from megatron.rl.config import RewardConfig
from megatron.rl.errors import RewardError
from megatron.rl.rewards.names import unknown_name
from megatron.rl.rewards.pool import WorkerPool
from megatron.rl.rewards.scorer import ExactScorer, Scorer


def _exact(_: RewardConfig) -> Scorer:
    return ExactScorer()


def _in_workers(
    spec: str, module: str, package: str, *, right_response: str = "{}", by_answer: bool = True
) -> Callable[[RewardConfig], Scorer]:
    """A reward whose function ``spec`` needs ``module``, which is installed as ``package``; see WorkerPool."""

    def make(config: RewardConfig) -> Scorer:
        if importlib.util.find_spec(module) is None:
            raise RewardError(f"reward {config.name} needs a package that is missing: pip install {package}")
        return WorkerPool(
            spec,
            workers=config.workers,
            timeout_s=config.timeout_s,
            right_response=right_response,
            by_answer=by_answer,
        )

    return make


REWARDS: dict[str, Callable[[RewardConfig], Scorer]] = {
    "math-verify": _in_workers(
        "megatron.rl.rewards.math_verify_scorer:score", "math_verify", "math-verify", right_response=r"\boxed{{{}}}"
    ),
    "exact": _exact,
    "reasoning-gym": _in_workers(
        "megatron.rl.rewards.reasoning_gym_scorer:score", "reasoning_gym", "reasoning-gym", by_answer=False
    ),
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
