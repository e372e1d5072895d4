"""Pairs that math-verify finds equal; the exact check keeps those that are."""

import pytest
from math_verify import LatexExtractionConfig, parse, verify

from megatron.rl.rewards.exactness import equal_exactly

# math-verify rounds the difference away.
DIFFERENT = [
    ("0.00000001", "0.00000002"),
    (r"\sqrt{10^{100}+1}", "10^{50}"),
    ("3.14159265", "3.14159266"),
    ("(0.00000001, 2)", "(0.00000002, 2)"),
    ("[0.00000001, 2]", "[0.00000002, 2]"),
    (r"\{0.00000001, 2\}", r"\{0.00000002, 2\}"),
    (r"\begin{pmatrix}0.00000001\\2\end{pmatrix}", r"\begin{pmatrix}0.00000002\\2\end{pmatrix}"),
    ("x=0.00000001", "0.00000002"),
]
EQUAL = [
    ("74", "74.0"),
    (r"\frac{1}{3}", "0.333333"),
    ("0.3333333", r"\frac{1}{3}"),
    (r"\pi", "3.14159265"),
    (r"\frac{2}{3}", "0.6666667"),
    ("10^{-20}", "0.00000000000000000001"),
    ("10^{50}", "1" + "0" * 50),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    ("(x+1)^2", "x^2+2x+1"),
    ("0.5x", r"\frac{x}{2}"),
    (r"\{2, 1\}", "1, 2"),
    (r"\log_2 8", "3"),
    ("2+3i", "3i+2"),
    (r"\begin{pmatrix}0.5\\2\end{pmatrix}", r"\begin{pmatrix}\frac12\\2\end{pmatrix}"),
    ("x > 3", "3 < x"),
    (r"(1,2)\cup(3,4)", r"(3,4)\cup(1,2)"),
    (r"\infty", r"\infty"),
]


def _parsed(latex):
    (value,) = parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return value


@pytest.mark.parametrize(("gold", "other"), DIFFERENT)
def test_rounding_equates_nothing(gold, other):
    gold, other = _parsed(gold), _parsed(other)
    assert verify(gold, other, timeout_seconds=None)
    assert not equal_exactly(gold, other)


@pytest.mark.parametrize(("gold", "other"), EQUAL)
def test_equal_values_stay_equal(gold, other):
    gold, other = _parsed(gold), _parsed(other)
    assert verify(gold, other, timeout_seconds=None)
    assert equal_exactly(gold, other)
