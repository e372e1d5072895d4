"""Whole responses are in answers.jsonl; here is where an answer is looked for, and that it is found in no time."""

import contextlib

import pytest

from megatron.rl.rewards.final_answer import final_answer
from megatron.rl.rewards.protocol import UnreadableResponse


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<think>\boxed{1}</think>The answer is 2.", "2"),
        (r"<think>a</think><think>\boxed{1}</think> \boxed{2}", "2"),
        ("<think>So the answer is 1.</think>\n", "1"),  # nothing is told, so what is thought counts
        (r"The answer is 3. \boxed{2}", "2"),
        ("The answer is 3<|im_end|>", "3"),
        ("<|channel|>final<|message|>It is 3", "3"),
        ("The answer is 3. The answer is 4.", "4"),
        ("The answer to part (b) is 3. So the total is 4.", "4"),
        ("The answer is 3. I hope the answer is clear.", "3"),
        ("The answer is 3. So 2 + 1 = 3 as it must be.", "3"),
        ("#### 4\n#### 5", "5"),
        ("#### Step 4: add\nThus it is 5.", "5"),
        ("#### 1. Add 7\nThus it is 5.", "5"),
        ("The answer is $x = 1$ and $y = 2$.", "$x = 1$ and $y = 2$"),
        ("The answer is 5 apples and 6 pears.", "5 apples and 6 pears"),
        ("The answer is 5, since 2 + 3 = 5.", "5"),
        ("The answer is the sum, which is 7.", "7"),
        ("**Answer:** $\\frac{1}{2}$.", r"$\frac{1}{2}$"),
        ("Answer:\n\n- 8 cm\n\nGood luck!", "8 cm"),
        ("The cost is $5 and the price $7, so she gains $2.", "$2"),
        ("Thus $2$ is the answer, not $3$.", "$2$"),
        ("Then 2**10 = 1024.", "2**10 = 1024"),
    ],
)
def test_the_last_statement_of_an_answer(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "response", ["I tried 2 ways.", "Let $n = 5$.", "Maybe 5?", "What is the answer?", "The answer is unclear.", "..."]
)
def test_what_is_no_statement_is_no_answer(response):
    with pytest.raises(UnreadableResponse):
        final_answer(response)


@pytest.mark.parametrize(
    "piece",
    [
        "$",
        "(",
        r"\boxed{",
        r"\boxed{5}, ",
        "answer: ",
        "The answer is ",
        "is ",
        "so ",
        ", so ",
        "= ",
        r"\[",
        "{",
        " ",
        "_",
    ]
    + ["5, ", "5 and ", "<answer>", "\n", "a'", "**", "1,000,", r"\begin{matrix}", "is the answer", "#### "],
)
@pytest.mark.timeout(20)
def test_no_text_keeps_it_busy(piece):
    """Quadratic work on 100,000 characters would take minutes."""
    for text in (piece * (100_000 // len(piece)), rf"\boxed{{{piece * (100_000 // len(piece))}}}"):
        with contextlib.suppress(UnreadableResponse):
            final_answer(text)
