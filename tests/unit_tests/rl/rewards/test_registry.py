import importlib.util

import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.errors import RewardError
from megatron.rl.rewards import REWARDS, make_scorer


def test_every_reward_scores_by_its_name():
    assert set(REWARDS) == {"math-verify", "exact", "reasoning-gym"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig("math_verify"), "unknown reward 'math_verify'; did you mean: math-verify"),
        (RewardConfig("zzz"), "unknown reward 'zzz'; choose one of: exact, math-verify, reasoning-gym"),
        (RewardConfig(workers=0), "at least 1 worker process .got 0"),
        (RewardConfig(timeout_s=0.0), "must be positive.*got 0.0"),
        (RewardConfig(timeout_s=float("nan")), "must be positive.*got nan"),
    ],
)
def test_impossible_configurations_are_refused(config, message):
    with pytest.raises(RewardError, match=message):
        make_scorer(config)


@pytest.mark.parametrize("name", ["math-verify", "reasoning-gym"])
def test_a_missing_package_is_named(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(RewardError, match=f"reward {name} needs a package that is missing: pip install {name}"):
        make_scorer(RewardConfig(name))
