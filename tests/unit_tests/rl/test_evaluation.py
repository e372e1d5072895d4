"""Evaluation's numbers on hand-made scores."""

from typing import Any

import pytest

from megatron.rl.config import SamplingConfig
from megatron.rl.evaluation import evaluate
from megatron.rl.types import Completion, Prompt, RewardResult

SAMPLING = SamplingConfig(max_new_tokens=9)
PROMPTS = [Prompt(i, "", (5,), "") for i in range(3)]


class StubCollector:
    """Gives hand-made results, and keeps what was asked of it."""

    def __init__(self, results):
        self.results = results
        self.asked = None

    def sample(self, prompts, group_size, sampling, label):
        self.asked = (prompts, group_size, sampling, label)
        return [prompt for prompt in prompts for _ in range(group_size)]

    def scored(self, pending):
        lengths = range(1, len(pending) + 1)
        return [
            (prompt, Completion("", (5,), (7,) * length, (-1.0,) * length, "stop", (0,) * length), result)
            for prompt, length, result in zip(pending, lengths, self.results, strict=True)
        ]


def _evaluate(*results, samples=2):
    collector: Any = StubCollector([r if isinstance(r, RewardResult) else RewardResult(r) for r in results])
    return evaluate(collector, PROMPTS, samples, SAMPLING, "eval4"), collector.asked


def test_mean_and_pass_at_k():
    found, asked = _evaluate(1.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert asked == (PROMPTS, 2, SAMPLING, "eval4")
    assert found.reward == pytest.approx(3 / 6)
    assert found.pass_at_k == pytest.approx(2 / 3)
    assert (found.prompts, found.samples, found.timeouts, found.errors) == (3, 2, 0, 0)
    assert found.response_length == pytest.approx((1 + 2 + 3 + 4 + 5 + 6) / 6)


def test_time_outs_and_errors_score_nothing_and_are_counted():
    timeout, error = RewardResult(0.0, "timeout", "5 s"), RewardResult(0.0, "error", "died")
    found, _ = _evaluate(timeout, 1.0, timeout, error, 0.0, RewardResult(0.0, "unreadable", "no answer"))
    assert (found.timeouts, found.errors, found.unreadable) == (2, 1, 1)
    assert found.reward == pytest.approx(1 / 6)
    assert found.pass_at_k == pytest.approx(1 / 3)


def test_half_a_point_does_not_pass():
    found, _ = _evaluate(0.5, 0.5, 0.51, 0.0, 0.2, 0.3)
    assert found.pass_at_k == pytest.approx(1 / 3)
    assert found.reward == pytest.approx(2.01 / 6)


def test_one_sample_each():
    found, asked = _evaluate(1.0, 0.0, 1.0, samples=1)
    assert asked[1] == found.samples == 1
    assert found.reward == found.pass_at_k == pytest.approx(2 / 3)
