"""Mathematical equality of a response's final answer with the right one. Runs in the workers.

What the answer is, this project decides (:mod:`~megatron.rl.rewards.final_answer`); whether two answers are equal,
math-verify does, but for its rounding (:mod:`~megatron.rl.rewards.exactness`).
"""

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, Integer, Rational

from megatron.rl.rewards.answer_notation import Reading, read_answer
from megatron.rl.rewards.exactness import equal_exactly
from megatron.rl.rewards.final_answer import final_answer
from megatron.rl.rewards.protocol import UnreadableResponse
from megatron.rl.rewards.units import same_unit

# The library warns that its own time-out is off; the worker's deadline stands in for it.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
# It would strip units that are variables (3t becomes 3); ours are gone by then.
_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


class UnusableAnswer(ValueError):
    """The problem's right answer is no mathematics, so nothing can be compared with it."""


@dataclass(frozen=True)
class _Answer:
    reading: Reading
    values: list[Any]  # what math-verify makes of the reading's forms


def score(request: dict[str, Any]) -> float:
    """1 where math-verify finds the response's final answer equal to the right one, else 0.

    The right answer may be written in LaTeX or plainly. Raises:
        UnusableAnswer: the right answer cannot be read.
        UnreadableResponse: the response states no answer, or one that cannot be read.
    """
    gold = _right_answer(request["answer"])
    stated = final_answer(request["response"])
    try:
        answer = _parsed(stated)
    except ValueError as error:
        raise UnreadableResponse(f"its answer {stated[:200]!r} cannot be read: {error}") from None
    return float(_are_equal(gold, answer))


def _right_answer(answer: str) -> _Answer:
    try:
        return _parsed(answer)
    except ValueError as error:
        raise UnusableAnswer(f"the answer {answer!r} is not mathematics ({error})") from None


@functools.lru_cache(maxsize=4096)  # a group's responses share their right answer, and many of them theirs
def _parsed(text: str) -> _Answer:
    """Raises ValueError where no form of ``text`` can be parsed whole."""
    reading = read_answer(text)
    values = [_without_repetition(value) for form in reading.forms for value in _parse_whole(form)]
    if not values:
        raise ValueError("no mathematics")
    return _Answer(reading, values)


def _parse_whole(latex: str) -> list[Any]:
    if _NUMBER.fullmatch(latex):
        return [Float(latex) if "." in latex else Integer(latex)]  # a hundredth of the grammar's time
    # first_match: where the formula cannot be parsed, its parts must not be tried.
    return parse(
        f"${latex}$", [_LATEX], fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )


def _without_repetition(value: Any) -> Any:
    """One value said in several ways, as in "3/4, or 75%", is one value."""
    if isinstance(value, FiniteSet) and len(value.args) > 1:
        first, *others = value.args
        if all(_is_equal(first, other) for other in others):
            return first
    return value


def _are_equal(gold: _Answer, answer: _Answer) -> bool:
    one, other = gold.reading, answer.reading
    if not same_unit(one.unit, other.unit) or (one.base and other.base and one.base != other.base):
        return False
    # 10% is right for 10 and for 1/10, but 0.1% is not right for 10%.
    pairs = [(a, b) for a in gold.values for b in answer.values]
    if one.percent != other.percent:
        pairs += [(_hundredth(a, one.percent), _hundredth(b, other.percent)) for a, b in pairs]
    return any(_is_equal(a, b) for a, b in pairs)


def _hundredth(value: Any, percent: bool) -> Any:
    return value / 100 if percent and isinstance(value, Expr) else value


def _is_equal(gold: Any, value: Any) -> bool:
    if isinstance(gold, Rational) and isinstance(value, Rational):
        return gold == value
    return verify(gold, value, timeout_seconds=None) and equal_exactly(gold, value)


# The grammar's tables are built on first use; the first response should not pay for them.
score({"response": r"The answer is $\frac{1}{2}$.", "answer": "0.5"})
