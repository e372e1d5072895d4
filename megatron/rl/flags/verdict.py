"""What a flag comes to in this program, and how the tables of verdicts are written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """The four things that can become of a flag."""

    ACTS = "acts"
    HOLDS = "holds anyway"  # what it asks for is so without it: it is let through
    MODEL = "comes from the model"  # it may be given, but must not contradict --hf-model
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """A verdict on some flags.

    Args:
        kind: what becomes of them.
        flags: separated by blanks, each by one of the names that the parser has for it.
        why: what it does here, where that is not just what Megatron says; or why it is refused, and what to use.
        needs: names of conditions (:mod:`megatron.rl.flags.conditions`) without which it would do nothing.
        values: the only values that can be given. None: any value, or, of a refused flag, one that leaves what it is
            about switched off (0, none and the like).
    """

    kind: Kind
    flags: str
    why: str = ""
    needs: tuple[str, ...] = ()
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Theme:
    """The verdicts on what belongs together."""

    title: str
    rows: tuple[Row, ...]


def acts(flags: str, why: str = "", *, needs: str = "", values: Iterable[Any] | None = None) -> Row:
    """A row of flags that act; ``needs`` are separated by blanks."""
    return Row(Kind.ACTS, flags, why, tuple(needs.split()), None if values is None else tuple(values))


def holds(flags: str, why: str) -> Row:
    """A row of flags that ask for what is so in any case."""
    return Row(Kind.HOLDS, flags, why)


def from_model(flags: str, why: str = "") -> Row:
    """A row of flags whose values come from the Hugging Face checkpoint."""
    return Row(Kind.MODEL, flags, why)


def refused(flags: str, why: str, *, values: Iterable[Any] | None = None) -> Row:
    """A row of refused flags, but for ``values``, which are what is done in any case."""
    return Row(Kind.REFUSED, flags, why, values=None if values is None else tuple(values))


def by_flag(themes: Iterable[Theme]) -> Mapping[str, Row]:
    """The verdict on each flag. Raises ValueError for a flag with two."""
    found: dict[str, Row] = {}
    for theme in themes:
        for row in theme.rows:
            for flag in row.flags.split():
                if flag in found:
                    raise ValueError(f"{flag} has two verdicts")
                found[flag] = row
    return found
