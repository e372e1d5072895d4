"""Which problems a reward cannot score: their own right answer, given as a response gives it, does not score 1."""

from collections.abc import Hashable, Mapping, Sequence

from megatron.rl.rewards.scorer import Scorer
from megatron.rl.types import Prompt, RewardItem, RewardResult

Reasons = dict[Hashable, str]  # by Scorer.key, why a problem cannot be scored


def check_share(scorer: Scorer, prompts: Sequence[Prompt], rank: int = 0, ranks: int = 1) -> Reasons:
    """Scores the right answer of each distinct problem of this rank's share; those that do not score 1.

    The shares of all ranks together are all of ``prompts``. Problems that the reward cannot tell apart, such as those
    with one answer, are scored once.
    """
    distinct = {scorer.key(prompt): prompt for prompt in reversed(prompts)}
    mine = list(distinct.items())[rank::ranks]
    results = scorer.score([RewardItem(scorer.right_response(prompt.answer), prompt) for _, prompt in mine])
    return {key: _reason(result) for (key, _), result in zip(mine, results, strict=True) if not _is_right(result)}


def unscorable(scorer: Scorer, prompts: Sequence[Prompt], reasons: Mapping[Hashable, str]) -> list[tuple[Prompt, str]]:
    """The problems that ``reasons`` of all ranks are about, each with its reason, in their order."""
    return [(prompt, reasons[key]) for prompt in prompts if (key := scorer.key(prompt)) in reasons]


def _is_right(result: RewardResult) -> bool:
    return result.status == "ok" and result.score == 1.0


def _reason(result: RewardResult) -> str:
    return result.detail or f"it scores {result.score:g}"
