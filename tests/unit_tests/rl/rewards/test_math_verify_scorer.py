"""Scores by the real scorer, in its worker. ``answers.jsonl`` holds pairs in the styles that models write."""

import json
import threading
from pathlib import Path

import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.rewards import make_scorer
from tests.unit_tests.rl.rewards.items import item

TABLE = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
# Right answers as data sets have them; each must score in a box of its own.
ODD_ANSWERS = r"""
[-2,7]
(-\infty,2]\cup[3,\infty)
(-\infty, 0) \cup (0, \infty)
\left(\frac{1}{2}, 3\right]
\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{cases} x = 1 \\ y = 2 \end{cases}
\text{(A)}
\textbf{(C)}\ 12
A
E
(D)
x \in [-2,7]
11\sqrt2
\$18.90
\$32,\!348
1,000,000
10{,}000
2\frac{3}{4}
-1\frac{1}{2}
17\frac12
90^\circ
60^{\circ}\text{C}
10\%
12.5\%
\frac{1}{2}\%
\{1,2\}
\left\{ 1, 2, 3 \right\}
\{\}
\emptyset
\varnothing
(6,31,-1)
(3, \frac{\pi}{2})
\langle 1,2,3\rangle
-2,1
4\text{ or }5
x=1, y=2
x = 1 \text{ or } x = 2
\pm 2
2 \pm \sqrt{3}
3:2
1:2:3
5:30 \text{ p.m.}
5 \text{ hours and } 3 \text{ minutes}
12 \text{ inches}
15\mbox{ cm}^2
864 \mbox{ inches}^2
5.4 \text{ cents}
50 \text{ km/h}
17\text{ ways}
\text{Evelyn}
\text{even}
Friday
\text{no solution}
\text{June 20}
\text{infinitely many}
Yes
No
True
4210_{5}
2516_8
0.1\overline{6}
0.\overline{3}
10^{-20}
1e-20
7^{20}
3.0\times10^{8}
10!
\binom{10}{3}
\frac 59
\frac43
\frac12
\dfrac{1}{2}
\tfrac{1}{2}
1.36
.5
+5
5.
033
-\frac{35}{9}
\frac{3\sqrt{3}}{4}
\sqrt[3]{4}
3r^5-6r^4
y = 2x + 3
f(x)=2x
x^{2}+y^{2}=1
6-5i
-i
e
e^{2}
\mathrm{e}
\ln 3
\log_2 5
\cos\theta
\sin 30^\circ
\lfloor x \rfloor
|x|
\overline{AB}
\angle ABC
ABC
xy
x < 3
-1 < x < 2
x\ge 5
\infty
\mathbb{R}
2k\pi, k\in\mathbb{Z}
x \equiv 5 \pmod{7}
5 \pmod 7
\sqrt{10^{100}+1}
""".strip().splitlines()


@pytest.fixture(scope="module")
def scorer():
    with make_scorer(RewardConfig("math-verify", workers=1, timeout_s=60)) as scorer:
        yield scorer


def test_the_table_has_both_kinds():
    right = sum(row["score"] for row in TABLE)
    assert len(TABLE) >= 100
    assert 0.4 < right / len(TABLE) < 0.6


def test_every_pair_of_the_table(scorer):
    results = scorer.score([item(row["response"], row["answer"]) for row in TABLE])
    wrong = [
        (row["answer"], row["response"], result)
        for row, result in zip(TABLE, results, strict=True)
        if (result.score, result.status) != (row["score"], "unreadable" if row.get("unreadable") else "ok")
    ]
    assert wrong == []


def test_right_answers_score_in_a_box(scorer):
    results = scorer.score([item(rf"So \boxed{{{answer}}}.", answer) for answer in ODD_ANSWERS])
    assert [answer for answer, result in zip(ODD_ANSWERS, results, strict=True) if result.score != 1.0] == []


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        ("", "it states no final answer"),
        ("   \n", "it states no final answer"),
        ("七十四", "it states no final answer"),
        ("$" * 5000, "it has 5000 characters"),
        ("(" * 5000, "it states no final answer"),
        (r"\boxed{" * 2000, "its box is not finished"),
        (r"74 candidates, so \boxed{\frac{", "its box is not finished"),
        ("The answer is\n\n", "it ends before its final answer"),
        (r"There are 74, so \boxed{@}", "its answer '@' cannot be read: no mathematics"),
        (r"\boxed{7 4}", "its answer '7 4' cannot be read: numbers stand side by side"),
        (r"\boxed{" + "7" * 2001 + "}", "it has 2001 characters"),
    ],
)
def test_an_unreadable_answer_scores_0_and_says_why(scorer, response, detail):
    (result,) = scorer.score([item(response, "74")])
    assert (result.score, result.status) == (0.0, "unreadable")
    assert result.detail.endswith(detail)
    assert result.is_scored


@pytest.mark.parametrize("answer", ["???", "七十四", r"\frac{"])
def test_an_answer_that_is_no_mathematics_is_an_error(scorer, answer):
    (result,) = scorer.score([item("74", answer)])
    assert (result.score, result.status) == (0.0, "error")
    assert result.detail.startswith(f"UnusableAnswer: the answer {answer!r} is not mathematics")
    assert not result.is_scored


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
