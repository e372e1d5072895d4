"""Whether two expressions that math-verify finds equal are so exactly.

math-verify rounds: 1e-8 is 2e-8 to it, and a root of 10^100 + 1 is 10^50. This check comes after it and only ever
refuses: numbers are compared as the rationals that are written, irrational ones to :data:`_DIGITS` digits.
"""

from collections.abc import Sequence
from typing import Any

from latex2sympy2_extended.logic import And
from sympy import Eq, Expr, FiniteSet, Float, Integer, Interval, MatrixBase, Rational, Set, Tuple, Union
from sympy.core.relational import Relational

_DIGITS = 150
_LEAST_DIGITS = 6  # significant ones that make a decimal count as the rounded form of 1/3 or pi


def equal_exactly(gold: Any, other: Any) -> bool:
    """False where ``gold`` and ``other`` differ by anything but how they are written.

    Both are what math-verify parses, and it finds them equal: wherever there is no number to compare, they are. A
    decimal of at least six significant digits equals a value that it rounds, such as 0.333333 for 1/3.
    """
    if isinstance(gold, str) or isinstance(other, str):
        return True
    gold, other = _sides(gold, other)
    if gold == other:
        return True
    if isinstance(gold, MatrixBase) and isinstance(other, MatrixBase):
        return all(map(equal_exactly, gold.doit(), other.doit()))
    if isinstance(gold, Interval) and isinstance(other, Interval):
        return equal_exactly(gold.start, other.start) and equal_exactly(gold.end, other.end)
    if isinstance(gold, Set | Tuple) or isinstance(other, Set | Tuple):
        return _same_elements(gold, other)
    if isinstance(gold, Expr) and isinstance(other, Expr):
        return _same_value(gold, other)
    return True


def _sides(gold: Any, other: Any) -> tuple[Any, Any]:
    """As math-verify takes them: x = 3 is 3, and of two equations for the same thing the right sides count."""
    gold_last, other_last = _last_relation(gold), _last_relation(other)
    both = isinstance(gold_last, Relational) and isinstance(other_last, Relational)
    if both and gold_last.lhs != other_last.lhs:
        return gold_last, other_last
    return _right_side(gold_last), _right_side(other_last)


def _last_relation(expression: Any) -> Any:
    return expression._unsorted_args[-1] if isinstance(expression, And) else expression


def _right_side(expression: Any) -> Any:
    return expression.rhs if isinstance(expression, Eq) else expression


def _same_elements(gold: Any, other: Any) -> bool:
    """Each element of the one has its equal in the other; in order where both are tuples."""
    left, right = _elements(gold), _elements(other)
    if left is None or right is None or len(left) != len(right):
        return True  # math-verify compared them as sets of numbers, by its own algebra
    if isinstance(gold, Tuple | Interval) and isinstance(other, Tuple | Interval):
        return all(map(equal_exactly, left, right))
    return all(any(equal_exactly(a, b) for b in right) for a in left)


def _elements(expression: Any) -> Sequence[Any] | None:
    if isinstance(expression, FiniteSet | Tuple | Union):
        return expression.args
    if isinstance(expression, Interval):
        return expression.start, expression.end
    return None if isinstance(expression, Set) else (expression,)


def _same_value(gold: Expr, other: Expr) -> bool:
    """Equal values; with unknowns in them, at one point that nothing is special about."""
    exact_gold, exact_other = _evaluated(gold), _evaluated(other)
    unknowns = sorted(exact_gold.free_symbols | exact_other.free_symbols, key=str)
    if unknowns:
        point = {symbol: Rational(1009 + 67 * place, 757) for place, symbol in enumerate(unknowns)}
        exact_gold, exact_other = exact_gold.subs(point), exact_other.subs(point)
    if not (exact_gold.is_number and exact_other.is_number):
        return True
    decimal = gold.has(Float) or other.has(Float)
    if _close(exact_gold, exact_other, decimal and bool(unknowns)):
        return True
    return decimal and (_rounds(exact_gold, gold, exact_other) or _rounds(exact_other, other, exact_gold))


def _evaluated(expression: Expr) -> Expr:
    """``expression`` worked out, its decimals as the rationals that they are written as."""
    return expression.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part))).doit()


def _close(a: Expr, b: Expr, loosely: bool) -> bool:
    if isinstance(a, Rational) and isinstance(b, Rational) and not loosely:
        return a == b or _is_percentage(a, b)
    left, right = a.evalf(_DIGITS), b.evalf(_DIGITS)
    tolerance = Rational(1, 10 ** (_LEAST_DIGITS if loosely else _DIGITS - 20))
    difference = abs(left - right)
    if not difference.is_comparable:
        return True  # no number to compare: an infinity, or a sum that sympy does not work out
    return bool(difference <= tolerance * max(abs(left), abs(right)))


def _is_percentage(a: Rational, b: Rational) -> bool:
    """10% is 10 as well as 1/10 to math-verify."""
    return a == 100 * b or b == 100 * a


def _rounds(decimal: Expr, written: Expr, value: Expr) -> bool:
    """``decimal``, which holds a written decimal, is ``value`` to its last digit, and ``value`` has further ones."""
    if not (written.has(Float) and isinstance(decimal, Rational)):
        return False
    places = _decimal_places(decimal)
    if places is None or len(str(abs(decimal.p) * 10**places // decimal.q)) < _LEAST_DIGITS:
        return False
    if isinstance(value, Rational) and (own := _decimal_places(value)) is not None and own <= places:
        return False
    return bool(abs(decimal - value).evalf(_DIGITS) <= Rational(1, 10**places))


def _decimal_places(value: Rational) -> int | None:
    """Digits after the point; None where they never end."""
    twos, fives, rest = 0, 0, int(Integer(value.q))
    while rest % 2 == 0:
        twos, rest = twos + 1, rest // 2
    while rest % 5 == 0:
        fives, rest = fives + 1, rest // 5
    return max(twos, fives) if rest == 1 else None
