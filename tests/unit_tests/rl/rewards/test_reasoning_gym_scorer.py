import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.rewards import make_scorer
from tests.unit_tests.rl.rewards.items import item

ENTRY = {"question": "Calculate 3 + 4.", "answer": "7", "metadata": {"difficulty": {}}}


@pytest.fixture(scope="module")
def scorer():
    with make_scorer(RewardConfig("reasoning-gym", workers=1, timeout_s=60)) as scorer:
        yield scorer


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("7", 1.0),
        (" 7\n", 1.0),
        ("<answer>8</answer> no: <answer> 7 </answer>.", 1.0),
        ("<answer>8</answer> 7", 0.0),
        ("8", 0.0),
        ("", 0.0),
        ("七", 0.0),
        ("it is 7", 1 / 7),  # the data set's partial credit: the answer's share of the response
    ],
)
def test_scores_are_the_data_sets_own(scorer, response, score):
    (result,) = scorer.score([item(response, "7", "chain_sum", ENTRY)])
    assert (result.score, result.status) == (pytest.approx(score), "ok")


@pytest.mark.parametrize(
    ("source", "metadata", "detail"),
    [
        ("chain_sums", ENTRY, "ValueError: unknown reasoning-gym data set 'chain_sums'; did you mean: chain_sum, "),
        ("chain_sum", {}, "ValueError: the problem's metadata is no reasoning-gym entry; make the file with "),
    ],
)
def test_a_problem_that_is_not_from_reasoning_gym_is_an_error(scorer, source, metadata, detail):
    (result,) = scorer.score([item("7", "7", source, metadata)])
    assert result.status == "error"
    assert result.detail.startswith(detail)
