import threading

import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.rewards import make_scorer
from tests.unit_tests.rl.rewards.items import item


@pytest.fixture(scope="module")
def scorer():
    with make_scorer(RewardConfig("math-verify", workers=1, timeout_s=60)) as scorer:
        yield scorer


RIGHT = [
    ("74", "74"),
    ("74\n", "74"),
    ("074", "74"),
    ("74.0", "74"),
    ("12 + 62 = 74", "74"),
    ("The answer is 74.", "74"),
    (r"so \boxed{74}, not 75", "74"),
    ("#### 70,000", "70000"),
    ("70000", "70,000"),
    ("-7", "-7"),
    ("1/2", r"\frac{1}{2}"),
    (r"$\frac12$", "0.5"),
    (r"\boxed{\frac{2}{4}}", "1/2"),
    (r"$10^{20}$", r"10^{20}"),
    (r"Thus \boxed{(1,2)}", "(1,2)"),
    (r"$x = 3$", "3"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{3\pi} 🙂 七", r"$3\pi$"),
    ("answer: $50\\%$", r"50\%"),
    (r"\boxed{33}", "033"),
]
WRONG = [
    ("", "74"),
    ("   \n", "74"),
    ("75", "74"),
    ("7 4", "74"),
    ("74 or 75", "74"),
    (r"\boxed{73} 74", "74"),
    ("no number at all", "74"),
    (r"\boxed{\frac{", "74"),
    ("七十四", "74"),
    ("$" * 5000, "74"),
    ("(" * 5000, "74"),
    (r"\boxed{" * 2000, "74"),
    ("10", r"10^{20}"),
]


def test_scores(scorer):
    """Unparsable responses are wrong answers: they have a score, and it is 0."""
    results = scorer.score([item(*pair) for pair in RIGHT + WRONG])
    assert {result.status for result in results} == {"ok"}
    scores = {pair: result.score for pair, result in zip(RIGHT + WRONG, results, strict=True)}
    assert scores == dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(WRONG, 0.0)


@pytest.mark.parametrize("answer", ["???", "七十四", r"\frac{"])
def test_an_answer_that_is_no_mathematics_is_an_error(scorer, answer):
    (result,) = scorer.score([item("74", answer)])
    assert (result.score, result.status) == (0.0, "error")
    assert result.detail == f"UnusableAnswer: the answer {answer!r} is not mathematics"


def test_scores_from_any_thread(scorer):
    """verl #3407: outside of the main thread every score was 0."""
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(scorer.score([item("74", "74"), item("73", "74")])))
    thread.start()
    thread.join()
    assert [result.score for result in scores] == [1.0, 0.0]


def test_a_response_on_which_math_verify_hangs_times_out():
    with make_scorer(RewardConfig("math-verify", workers=1, timeout_s=2)) as scorer:
        results = scorer.score([item("74", "74"), item(r"\boxed{10^{10^{10}}}", "74"), item("74", "74")])
    assert [(result.score, result.status) for result in results] == [(1.0, "ok"), (0.0, "timeout"), (1.0, "ok")]
