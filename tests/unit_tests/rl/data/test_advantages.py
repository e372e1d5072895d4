import math

import pytest

from megatron.rl.config import AdvantageConfig
from megatron.rl.data import count_groups, group_advantages, trained_samples
from megatron.rl.errors import ConfigError
from megatron.rl.types import RewardResult

MEAN = AdvantageConfig()
STD = AdvantageConfig(normalize_std=True)
LEAVE_ONE_OUT = AdvantageConfig(leave_one_out=True)


def results(*scores: float) -> list[RewardResult]:
    return [RewardResult(score) for score in scores]


TIMEOUT = RewardResult(0.0, "timeout")


def test_default_is_reward_minus_the_mean_of_its_own_group():
    assert group_advantages(results(1, 0, 0, 5, 5, 8), 3, MEAN) == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3, -1.0, -1.0, 2.0]
    )


def test_standard_deviation_is_the_sample_one():
    assert group_advantages(results(1, 0), 2, STD) == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)])


@pytest.mark.parametrize("n", [2, 3, 7, 16])
def test_leave_one_out_is_the_difference_to_the_others_and_n_over_n_minus_1_of_the_default(n):
    scores = [float((5 * i) % n) ** 0.5 for i in range(n)]
    left_out = group_advantages(results(*scores), n, LEAVE_ONE_OUT)
    assert left_out == pytest.approx([s - (sum(scores) - s) / (n - 1) for s in scores])
    assert left_out == pytest.approx([n / (n - 1) * a for a in group_advantages(results(*scores), n, MEAN)])


@pytest.mark.parametrize("config", [MEAN, STD, LEAVE_ONE_OUT, AdvantageConfig(True, True)])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_scores_give_exact_zeros(config, score):
    # The mean of three 0.1 is not 0.1 in floating point; a residue over its own deviation would be of size 1.
    assert group_advantages(results(score, score, score), 3, config) == [0.0, 0.0, 0.0]


def test_leave_one_out_and_deviation_together():
    both = group_advantages(results(1, 0, 0), 3, AdvantageConfig(normalize_std=True, leave_one_out=True))
    assert both == pytest.approx([1.5 * a for a in group_advantages(results(1, 0, 0), 3, STD)])


@pytest.mark.parametrize("size", [0, 1])
def test_a_group_of_one_is_refused(size):
    with pytest.raises(ConfigError, match=rf"at least 2 responses.*\(got a group size of {size}\)"):
        group_advantages(results(1.0), size, MEAN)


def test_results_that_do_not_fill_their_groups_are_refused():
    with pytest.raises(ValueError, match="5 results do not fill groups of 2"):
        group_advantages(results(1, 0, 1, 0, 1), 2, MEAN)


def test_no_results_no_advantages():
    assert group_advantages([], 4, MEAN) == []


@pytest.mark.parametrize("status", ["timeout", "error"])
def test_unscored_counts_as_zero_by_default_whatever_its_record_says(status):
    group = [*results(1, 0), RewardResult(9.0, status)]
    assert group_advantages(group, 3, MEAN) == group_advantages(results(1, 0, 0), 3, MEAN)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AdvantageConfig(unscored="exclude"), [0.5, 0.0, -0.5]),
        (AdvantageConfig(unscored="exclude", leave_one_out=True), [1.0, 0.0, -1.0]),
        (AdvantageConfig(unscored="exclude", normalize_std=True), [0.5**0.5, 0.0, -(0.5**0.5)]),
    ],
)
def test_excluded_responses_leave_baseline_and_denominators_to_the_others(config, expected):
    group = [RewardResult(1.0), RewardResult(9.0, "timeout"), RewardResult(0.0)]
    assert group_advantages(group, 3, config) == pytest.approx(expected)


@pytest.mark.parametrize("unscored", ["zero", "exclude"])
def test_an_unreadable_response_is_a_wrong_one(unscored):
    """Left out, it would be safer for the policy than a wrong answer."""
    group = [RewardResult(1.0), RewardResult(0.0, "unreadable"), RewardResult(0.0)]
    assert group_advantages(group, 3, AdvantageConfig(unscored=unscored)) == group_advantages(results(1, 0, 0), 3, MEAN)
    assert count_groups(group, 3, MEAN).unscored == 0


def test_a_group_with_one_score_left_has_no_signal():
    config = AdvantageConfig(unscored="exclude", leave_one_out=True)
    assert group_advantages([RewardResult(1.0), TIMEOUT, TIMEOUT], 3, config) == [0.0, 0.0, 0.0]


def test_unknown_treatment_is_refused():
    with pytest.raises(ConfigError, match="exclude"):
        group_advantages(results(1, 0), 2, AdvantageConfig(unscored="drop"))


def test_counts():
    groups = [*results(1, 1), *results(1, 0), TIMEOUT, RewardResult(1.0), TIMEOUT, RewardResult(0.0, "error")]
    counts = count_groups(groups, 2, MEAN)
    assert (counts.groups, counts.without_signal, counts.incomplete, counts.unscored) == (4, 2, 2, 3)
    assert count_groups(groups, 2, AdvantageConfig(unscored="exclude")).without_signal == 3


def test_groups_without_signal_are_kept_or_left_out_as_asked():
    """OpenRLHF PR #1239, TRL PR #6365: they skewed the denominators without a word."""
    advantages = [0.5, -0.5, 0.0, 0.0, 0.0, 1.0]
    assert trained_samples(advantages, 2, AdvantageConfig()) == [True] * 6
    filtering = AdvantageConfig(filter_flat_groups=True)
    assert trained_samples(advantages, 2, filtering) == [True, True, False, False, True, True]
    assert trained_samples([0.0] * 4, 2, filtering) == [False] * 4
