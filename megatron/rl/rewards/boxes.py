"""What a response has put in a box: ``\\boxed{...}``, ``\\fbox{...}``."""

import re

from megatron.rl.rewards.prose import Span
from megatron.rl.rewards.protocol import UnreadableResponse

_BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox)(?![A-Za-z])|(?<![A-Za-z\\])boxed(?=\{))\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s{}$,;]+")
_PLACEHOLDER = re.compile(
    r"[\s.…?_]*|\\[lc]?dots|(?:\\text\{)?(?:your |the |final )*answer(?: here)?\}?", re.IGNORECASE
)
# Boxes that a comma, "and" or "or" joins are one answer: \boxed{3} and $x = \boxed{4}$.
_BOX_LINK = re.compile(
    r"[\s$]*(?:(?:[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)[\s$]*)+(?:[A-Za-z]\w*\s*=\s*)?", re.IGNORECASE
)


def boxed_answer(text: str) -> str | None:
    """What stands in the last complete box, with those it is joined to; None where there is no box.

    An empty box, or one that only says "answer", is how the task was told and not counted. Raises
    :class:`UnreadableResponse` where all others are cut off.
    """
    openers = list(_BOX.finditer(text))
    if not openers:
        return None
    ends = _brace_pairs(text)
    boxes: list[tuple[Span, str]] = []
    unfinished = False
    for opener in openers:
        if boxes and opener.start() < boxes[-1][0].end:
            continue  # a box in a box
        span = _inside(text, opener.end(), ends)
        if span is None:
            unfinished = True
        elif not _PLACEHOLDER.fullmatch(text[span.start : span.end].strip()):
            boxes.append((Span(opener.start(), span.end + 1), _BOX.sub("", text[span.start : span.end])))
    if not boxes:
        if unfinished:
            raise UnreadableResponse("its box is not finished")
        return None
    parts = [boxes[-1][1].strip()]
    for (box, content), (following, _) in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        if not _BOX_LINK.fullmatch(text, box.end, following.start):
            break
        if content.strip() not in parts:
            parts.append(content.strip())
    return ", ".join(reversed(parts))


def _inside(text: str, start: int, ends: dict[int, int]) -> Span | None:
    """What a box command that ends at ``start`` holds: a group, or as TeX has it without one, the next thing."""
    if start < len(text) and text[start] == "{":
        return Span(start + 1, ends[start]) if start in ends else None
    bare = _BARE_BOX.match(text, start)
    return None if bare is None else Span(start, bare.end())


def _brace_pairs(text: str) -> dict[int, int]:
    pairs, open_braces = {}, []
    for match in _BRACES.finditer(text):
        if match.group() == "{":
            open_braces.append(match.start())
        elif match.group() == "}" and open_braces:
            pairs[open_braces.pop()] = match.start()
    return pairs
