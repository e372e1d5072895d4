"""One line about a name that does not exist."""

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """Names what is unknown and what is close to it; all that there is where nothing is close."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=5)
    listed = ", ".join(close or known)
    return f"unknown {what} {name!r}; {'did you mean' if close else 'choose one of'}: {listed}"
