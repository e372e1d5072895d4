import pytest

from megatron.rl.rewards.boxes import boxed_answer
from megatron.rl.rewards.protocol import UnreadableResponse


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("no box", None),
        (r"\boxed{5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\framebox{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5$", "5"),
        (r"$\boxed5$", "5"),
        ("boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x }", r"\left\{ x"),  # the escaped brace pairs with nothing
        ("\\boxed{\n5\n}", "5"),
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{1}" + "\n\n" + r"\boxed{1}", "1"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$, $y = \boxed{2}$", "1, 2"),
        (r"\boxed{1} or \boxed{1}", "1"),
        (r"\boxed{1} is wrong and \boxed{2} is right", "2"),
        (r"\boxed{1}\text{ or }\boxed{2}", "1, 2"),
        (r"\boxed{x = \boxed{5}}", "x = {5}"),
        (r"\boxed{3} so \boxed{4", "3"),
        (r"\boxed{3 so \boxed{4}", "4"),
        (r"Put it in \boxed{}. \boxed{7}", "7"),
        (r"\boxed{7}, as \boxed{...} was asked for", "7"),
        (r"Put it in \boxed{}", None),
        (r"I give \boxed{\text{answer}} at the end", None),
        (r"\boxedx", None),
    ],
)
def test_the_last_complete_box(response, answer):
    assert boxed_answer(response) == answer


@pytest.mark.parametrize("response", [r"\boxed{4", r"\boxed{\frac{1}{2}", r"\boxed{} \boxed{1", r"\boxed"])
def test_a_box_that_is_cut_off(response):
    with pytest.raises(UnreadableResponse, match="not finished"):
        boxed_answer(response)
