import pytest

from megatron.rl.rewards.answer_notation import Reading, read_answer


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("5.", ("5",)),
        ("$5$", ("5",)),
        (r"\(5\)", ("5",)),
        ("**5**", ("5",)),
        ("−5", ("-5",)),
        ("５", ("5",)),
        ("1,234,567", ("1234567",)),
        (r"1{,}234", ("1234",)),
        (r"1\,000", ("1000",)),
        ("(1,234)", ("(1,234)",)),  # a pair
        ("2 3/4", (r"2\frac{3}{4}",)),
        ("1e-20", (r"1 \times 10^{-20}",)),
        ("1.5 million", (r"1.5 \times 10^{6}",)),
        ("10^50", ("10^{50}",)),
        ("x¹²", ("x^{12}",)),
        ("sqrt(2)", (r"\sqrt{2}",)),
        ("√2", (r"\sqrt{2}",)),
        (r"0.1\overline{6}", (r"\frac{1}{6}",)),
        ("1:2:3", ("(1,2,3)",)),
        (r"\frac{1}{\mathrm{e}}", (r"\frac{1}{ e }",)),
        ("(B)", (r"\text{B}",)),
        (r"\textbf{(B)}\ 17", (r"\text{B}", "17")),
        ("Option C", (r"\text{C}",)),
        ("yes", (r"\text{yes}",)),
        ("xy", ("xy", r"\text{xy}")),
        ("the red and the blue one", (r"\text{redblueone}",)),
        (r"x \equiv 5 \pmod{7}", (r"\text{5mod7}",)),
        (r"\text{Area} = 5", ("5",)),
        ("3 and 4", ("3, 4",)),
        (r"x=5 \implies y=6", ("y=6",)),
        ("5 or more", (r"\text{5ormore}",)),
        (r"\begin{aligned} x &= 2 + 3 \\ &= 5 \end{aligned}", ("5",)),
        (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", ("x = 1, y = 2",)),
    ],
)
def test_one_notation_for_many(text, forms):
    assert tuple(" ".join(form.split()) for form in read_answer(text).forms) == forms


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        (r"5 \text{ cm}", Reading(("5",), unit="cm")),
        ("5 centimeters", Reading(("5",), unit="cm")),
        ("25 square meters", Reading(("25",), unit="m 2")),
        (r"25\,\mathrm{m}^2", Reading(("25",), unit="m 2")),
        ("5 apples", Reading(("5",))),
        ("5 m", Reading(("5 m",))),  # as well five times m
        ("3t", Reading(("3t",))),
        (r"\$18.90", Reading(("18.90",), unit="$")),
        ("90°", Reading(("90",), unit="deg")),
        (r"10\%", Reading(("10",), percent=True)),
        ("10 percent", Reading(("10",), percent=True)),
        ("2516_8", Reading(("2516",), base="8")),
        (r"101_{\text{two}}", Reading(("101",), base="two")),
    ],
)
def test_what_stands_around_the_value(text, reading):
    assert read_answer(text) == reading


@pytest.mark.parametrize(
    ("text", "message"), [("", "empty"), (" . ", "empty"), ("3 4", "side by side"), ("7" * 2001, "2001 characters")]
)
def test_what_cannot_be_compared(text, message):
    with pytest.raises(ValueError, match=message):
        read_answer(text)
