import pytest

from megatron.rl.rewards.prose import MATH, mask_math, quantities, sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so $x$ is", "so ### is"),
        (r"so \(x\) and \[y\]", "so ##### and #####"),
        ("so $$x\n= 1$$.", "so #########."),
        (r"\begin{align*}x\end{align*}!", "#" * 27 + "!"),
        ("it costs $5 and he has $6", "it costs $5 and he has $6"),
        ("9 * 2 = $18 on $x$", "9 * 2 = $18 on ###"),
        ("$5 each; then $7", "$5 each; then $7"),
        (r"\$5 and \$6", r"\$5 and \$6"),
        ("a $ b", "a $ b"),
        ("$x\n\ny$", "$x\n\ny$"),
        (r"$\text{two words here}$", "#" * 23),
        ("$\\frac{", "$\\frac{"),
    ],
)
def test_formulas_and_money(text, expected):
    assert mask_math(text).replace(MATH, "#") == expected
    assert len(mask_math(text)) == len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("there are 3 and 4 left", ["3 and 4"]),
        ("it is 3.5, or 7/2.", ["3.5, or 7/2"]),
        ("a 5 is a digit", ["5"]),
        ("x = 2y + 1 holds", ["x = 2y + 1"]),
        ("(3, 4) and {5}", ["(3, 4) and {5}"]),
        ("5 (five)", ["5"]),
        ("I am a man", []),
        (r"is \frac{1}{2} cm", [r"\frac{1}{2}"]),
        ("1,234.50", ["1,234.50"]),
        ("1e-20 here", ["1e-20"]),
        ("−7 there", ["−7"]),
    ],
)
def test_quantities(text, expected):
    assert [text[span.start : span.end] for span in quantities(text, 0, len(text))] == expected


def test_sentences_end_at_stops_and_lines_and_not_inside_numbers():
    text = "It is 3.14. Is it so? Yes!\nSo 5! = 120 it is"
    found = [text[span.start : span.end].strip(" .?!\n") for span in sentences(text)]
    assert found == ["So 5! = 120 it is", "Yes", "Is it so", "It is 3.14"]
