"""Mathematical equality of a response's final answer with the right one, by math-verify. Runs in the workers."""

import functools
import logging
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

# The library warns that its own time-out is off; the worker's deadline stands in for it.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


class UnusableAnswer(ValueError):
    """The problem's right answer is no mathematics, so nothing can be compared with it."""


def score(request: dict[str, Any]) -> float:
    """1 where math-verify finds the response equal to the answer, else 0.

    From the response math-verify takes what stands in a box, else the last formula or number; a response
    without any is wrong. The answer may be written in LaTeX or plainly. Raises :class:`UnusableAnswer` where
    the answer itself cannot be parsed.
    """
    gold = _parse_answer(request["answer"])
    return float(verify(gold, parse(request["response"], parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> list[Any]:
    # In a box, bare LaTeX is found whole: of a plain "10^{20}" only the 10 would be.
    boxed, latex = rf"\boxed{{{answer}}}", [LatexExtractionConfig()]
    if not parse(boxed, latex, fallback_mode="no_fallback", parsing_timeout=None):
        raise UnusableAnswer(f"the answer {answer!r} is not mathematics")
    return parse(boxed, latex, parsing_timeout=None)


# The grammar's tables are built on first use; the first response should not pay for them.
score({"response": r"$\frac{1}{2}$", "answer": "0.5"})
