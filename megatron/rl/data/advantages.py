"""Group-relative advantages: how much better a response is than the others to the same prompt."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.rl.config import AdvantageConfig
from megatron.rl.errors import ConfigError
from megatron.rl.types import RewardResult


@dataclass(frozen=True)
class GroupCounts:
    """What the groups of one rollout batch were worth."""

    groups: int
    without_signal: int  # all advantages are zero
    incomplete: int  # at least one response has no score
    unscored: int  # responses whose scoring timed out or failed


def group_advantages(results: Sequence[RewardResult], group_size: int, config: AdvantageConfig) -> list[float]:
    """The advantage of each response, in the order of ``results``: groups one after the other.

    With R the scores of a group's n counted responses (arXiv 2606.09821, section 2.2):

    * default: A_i = R_i - mean(R);
    * ``leave_one_out``: A_i = R_i - mean(R without i), which is n / (n - 1) times the default;
    * ``normalize_std``: either of them divided by the sample standard deviation of R (divisor n - 1).

    A group whose counted scores are all equal, or that has fewer than two of them, has advantage zero
    throughout: no epsilon, no rounding residue.

    A response whose scoring timed out or failed has no score. With ``unscored="zero"`` it counts as a response
    of score 0, as it does in the reported mean reward: math-verify hangs on responses such as 10^(10^10), and
    leaving those out would make them safer for the policy than a wrong answer. With ``unscored="exclude"`` it
    gets advantage zero and does not enter n, mean or deviation, for scorers that fail through no fault of the
    response; its tokens still count in the loss's denominators.

    Raises:
        ConfigError: ``group_size`` below 2, or an unknown ``unscored``.
        ValueError: the number of results is no multiple of ``group_size``.
    """
    advantages: list[float] = []
    for group in _groups(results, group_size):
        advantages.extend(_advantages_of_group(group, config))
    return advantages


def trained_samples(advantages: Sequence[float], group_size: int, config: AdvantageConfig) -> list[bool]:
    """Which responses are trained on: all, or with ``filter_flat_groups`` those whose group has any advantage.

    Advantages as :func:`group_advantages` gives them. A group without signal adds no gradient of the objective either
    way; filtered, its responses and tokens do not enlarge the denominators, nor does the entropy bonus see them.
    """
    if not config.filter_flat_groups:
        return [True] * len(advantages)
    groups = [advantages[start : start + group_size] for start in range(0, len(advantages), group_size)]
    return [any(group) for group in groups for _ in group]


def count_groups(results: Sequence[RewardResult], group_size: int, config: AdvantageConfig) -> GroupCounts:
    """Counts the groups that teach nothing and the responses without a score; arguments as above."""
    groups = list(_groups(results, group_size))
    return GroupCounts(
        groups=len(groups),
        without_signal=sum(not any(_advantages_of_group(group, config)) for group in groups),
        incomplete=sum(any(not result.is_scored for result in group) for group in groups),
        unscored=sum(not result.is_scored for result in results),
    )


def _groups(results: Sequence[RewardResult], group_size: int) -> list[Sequence[RewardResult]]:
    if group_size < 2:
        raise ConfigError(
            f"a group needs at least 2 responses: the advantage compares them (got a group size of {group_size})"
        )
    if len(results) % group_size:
        raise ValueError(f"{len(results)} results do not fill groups of {group_size}")
    return [results[start : start + group_size] for start in range(0, len(results), group_size)]


def _advantages_of_group(group: Sequence[RewardResult], config: AdvantageConfig) -> list[float]:
    if config.unscored not in ("exclude", "zero"):
        raise ConfigError(f'unscored responses: choose "exclude" or "zero" (got {config.unscored!r})')
    # A failed scoring carries no score, whatever number stands in its record.
    scores = [result.score if result.is_scored else 0.0 for result in group]
    counted = [result.is_scored or config.unscored == "zero" for result in group]
    kept = [score for score, counts in zip(scores, counted, strict=True) if counts]
    if len(kept) < 2 or min(kept) == max(kept):
        return [0.0] * len(group)
    mean = math.fsum(kept) / len(kept)
    scale = len(kept) / (len(kept) - 1) if config.leave_one_out else 1.0
    if config.normalize_std:
        scale /= statistics.stdev(kept)
    return [(score - mean) * scale if counts else 0.0 for score, counts in zip(scores, counted, strict=True)]
