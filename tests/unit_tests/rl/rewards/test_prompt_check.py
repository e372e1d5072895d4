from concurrent.futures import Future

import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.rewards import check_share, make_scorer, unscorable
from megatron.rl.rewards.scorer import ExactScorer
from megatron.rl.types import Prompt, RewardResult
from tests.unit_tests.rl.rewards.items import item


class Counting(ExactScorer):
    """Counts what it scores; an answer with a question mark is never right."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def submit(self, item):
        self.scored.append(item.prompt.answer)
        return super().submit(item if "?" not in item.response else type(item)("", item.prompt))


def prompts(*answers: str) -> list[Prompt]:
    return [Prompt(index, "", (1,), answer) for index, answer in enumerate(answers)]


def test_each_answer_is_scored_once_over_all_ranks():
    scorers = [Counting() for _ in range(3)]
    problems = prompts("1", "2", "1", "??", "3", "4", "??", "1")
    shares = [check_share(scorer, problems, rank, 3) for rank, scorer in enumerate(scorers)]
    assert sorted(answer for scorer in scorers for answer in scorer.scored) == ["1", "2", "3", "4", "??"]
    reasons = {key: reason for share in shares for key, reason in share.items()}
    assert reasons == {"??": "it scores 0"}
    assert [prompt.index for prompt, _ in unscorable(scorers[0], problems, reasons)] == [3, 6]


def test_math_verify_reads_the_right_answer_in_a_box():
    problems = prompts(
        "1", r"\frac12", "??", r"x \in [-2,7]", r"\text{(A)}", r"\frac{", "1 2", r"\{1,2\}", "{", "Friday"
    )
    with make_scorer(RewardConfig(workers=1, timeout_s=60)) as scorer:
        found = unscorable(scorer, problems, check_share(scorer, problems))
    assert [(prompt.answer, reason.partition(":")[0]) for prompt, reason in found] == [
        ("??", "UnusableAnswer"),
        (r"\frac{", "UnusableAnswer"),
        ("1 2", "UnusableAnswer"),
        ("{", "UnusableAnswer"),
    ]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (RewardResult(0.0, "timeout", "no score within 5 s"), "no score within 5 s"),
        (RewardResult(0.0, "error", "KeyError: 'x'"), "KeyError: 'x'"),
        (RewardResult(0.05), "it scores 0.05"),
        (RewardResult(1.0), None),
    ],
)
def test_whatever_is_not_1_is_told_with_its_reason(result, reason):
    class Always(ExactScorer):
        def submit(self, item):
            future = Future()
            future.set_result(result)
            return future

    assert check_share(Always(), prompts("5")) == ({} if reason is None else {"5": reason})


@pytest.mark.parametrize(("name", "same"), [("math-verify", True), ("exact", True), ("reasoning-gym", False)])
def test_problems_are_told_apart_by_what_the_reward_looks_at(name, same):
    with make_scorer(RewardConfig(name, workers=1)) as scorer:
        one, other = item("", "5", "a", {"n": 1}).prompt, item("", "5", "a", {"n": 2}).prompt
        assert (scorer.key(one) == scorer.key(other)) is same
        assert scorer.key(one) == scorer.key(item("", "5", "a", {"n": 1}).prompt)
