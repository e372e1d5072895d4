import pytest

from megatron.rl.rewards.scorer import ExactScorer
from tests.unit_tests.rl.rewards.items import item


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("74", "74", 1.0),
        (" 74\n", "74 ", 1.0),
        ("Σ 七 🙂", "Σ 七 🙂", 1.0),
        ("", "74", 0.0),
        ("74.0", "74", 0.0),
        ("yes", "Yes", 0.0),
        ("a  b", "a b", 0.0),
    ],
)
def test_exact(response, answer, score):
    with ExactScorer() as scorer:
        future = scorer.submit(item(response, answer))
        assert future.done()
        assert (future.result().score, future.result().status) == (score, "ok")
        assert scorer.score([item(response, answer)] * 2) == [future.result()] * 2
