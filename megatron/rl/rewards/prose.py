"""Where mathematics stands in running text: formulas between delimiters, quantities between words, sentences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MATH = "\x01"  # stands for each character of a formula in masked text
_DELIMITERS = re.compile(r"\\\\|\\\$|\$\$|\$|\\\[|\\\(|\\begin\{([a-z]*matrix|cases|array|align(?:ed)?|equation)\*?\}")
_CLOSERS = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{[^{}]*\}"
_PROSE_WORD = re.compile(r"[A-Za-z]{2,}")
_FUNCTIONS = r"(?:sqrt|pi|sin|cos|tan|log|ln|exp|infinity|inf)"
_SENTENCE_END = re.compile(r"[.?。](?=[\s*)\"'”]|$)|!(?=\s*\n|\s*$|\s+[A-Z])|[。！？]|\n")
_QUANTITY = re.compile(
    rf"""(?:(?:
      {MATH}+
    | {_TEXT_COMMAND}
    | \\[A-Za-z]+ | \\[^A-Za-z\s]
    | \d+(?:[.,]\d+)*(?:[eE][-+−]?\d+)? | \.\d+
    | (?<![A-Za-z]){_FUNCTIONS}(?![A-Za-z])
    | (?![aAI]\s+(?!because|since)[A-Za-z\d{MATH}])(?<![A-Za-z'’])[A-Za-z](?![A-Za-z'’])
    | [-+*/^=<>≤≥≠≈≡±×÷·⋅√∛π∞°%|!(){{}}\[\]_,:;~∪∩∈∅−–¼½¾⅓⅔⁻⁰¹²³⁴-⁹₀-₉ℝℤℕℚℂ$€£¥₹θα-ω]
    )[ \t]*)+""",
    re.VERBOSE,
)
_LEADING_NOISE = re.compile(r"[\s,:;=!)\]}_*/]+")
_TRAILING_NOISE = " \t\r\n,:;=+*/^<>([{$−–-"
_LINK = re.compile(r"\s*(?:[a-z]{2,}\s+)?(?:,\s*)?(?:and|or)\s+|\s*[,;]\s+", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """``text[start:end]``."""

    start: int
    end: int


def mask_math(text: str) -> str:
    """``text`` at its length, with every formula that stands between delimiters, these included, as :data:`MATH`.

    A dollar sign that is money (``it costs $5 and $6``) stays. Time grows as the text does.
    """
    pieces, done = [], 0
    missing: set[str] = set()  # closers of which there is none left
    at = 0
    while (match := _DELIMITERS.search(text, at)) is not None:
        at = match.end()
        end = _end_of_formula(text, match, missing)
        if end is not None:
            pieces += [text[done : match.start()], MATH * (end - match.start())]
            done = at = end
    return "".join([*pieces, text[done:]])


def _end_of_formula(text: str, opener: re.Match[str], missing: set[str]) -> int | None:
    found = opener.group()
    if found in (r"\\", r"\$"):
        return None
    if found == "$":
        return _end_of_inline(text, opener.end())
    closer = _CLOSERS.get(found) or found.replace(r"\begin", r"\end")
    if closer in missing:
        return None
    start = text.find(closer, opener.end())
    if start < 0:
        missing.add(closer)
        return None
    return start + len(closer)


def _end_of_inline(text: str, start: int) -> int | None:
    """The end of the formula whose dollar sign ends at ``start``; None where the sign is money."""
    close = re.compile(r"(?<!\\)\$|\n\s*\n").search(text, start)
    if close is None or close.group() != "$":
        return None
    inside = text[start : close.start()]
    if not inside.strip() or text[close.end() : close.end() + 1].isdigit():
        return None
    if inside[0].isdigit() and inside[-1].isspace():
        return None
    plain = re.sub(rf"{_TEXT_COMMAND}|\\[A-Za-z]+|\b{_FUNCTIONS}\b", " ", inside)
    return None if len(_PROSE_WORD.findall(plain)) > 1 else close.end()


def sentence_end(masked: str, start: int) -> int:
    """Where the sentence, or the line, that holds ``start`` ends; its full stop is left out."""
    match = _SENTENCE_END.search(masked, start)
    return len(masked) if match is None else match.start()


def sentences(masked: str) -> Iterator[Span]:
    """The sentences and lines that hold more than white space, last first."""
    ends = [match.end() for match in _SENTENCE_END.finditer(masked)]
    starts, ends = [0, *ends], [*ends, len(masked)]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        if masked[start:end].strip():
            yield Span(start, end)


def quantities(masked: str, start: int, end: int) -> list[Span]:
    """What reads as mathematics in ``masked[start:end]``, from left to right.

    Quantities that a comma, "and" or "or" joins are one: ``3 and 4``, ``5 apples or 6``.
    """
    found: list[Span] = []
    for match in _QUANTITY.finditer(masked, start, end):
        span = _trimmed(masked, match.start(), match.end())
        if span is None:
            continue
        if found and _LINK.fullmatch(masked, found[-1].end, span.start):
            found[-1] = Span(found[-1].start, span.end)
        else:
            found.append(span)
    return found


def _trimmed(masked: str, start: int, end: int) -> Span | None:
    """Without punctuation and open brackets at the ends; None where no number, formula or symbol is left."""
    if (lead := _LEADING_NOISE.match(masked, start, end)) is not None:
        start = lead.end()
    piece = masked[start:end].rstrip(_TRAILING_NOISE)
    if not any(bracket in piece for bracket in "([{"):
        piece = piece.rstrip(")]} \t")
    return Span(start, start + len(piece)) if re.search(rf"[\d{MATH}\\π∞∅½¼¾⅓⅔ℝℤℕℚℂA-Za-zθα-ω]", piece) else None
