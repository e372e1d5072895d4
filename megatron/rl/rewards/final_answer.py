"""What a response gives as its final answer: the text as it stands, never a number from elsewhere.

In this order: the last complete box; else the last statement that calls itself the answer; else the last sentence
that states a value. Of a response that thinks in ``<think>`` tags only what follows them counts, if anything does.
"""

import re
from collections.abc import Iterator

from megatron.rl.rewards.prose import MATH, Span, mask_math, quantities, sentence_end, sentences
from megatron.rl.rewards.protocol import UnreadableResponse

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"[^\s{}$.,;]+")
_PLACEHOLDER = re.compile(r"[\s.…?_]*|\\[lc]?dots|(?:\\text\{)?(?:your |the |final )*answer(?: here)?\}?", re.IGNORECASE)
# Boxes that a comma, "and" or "or" joins are one answer: \boxed{3} and $x = \boxed{4}$.
_BOX_LINK = re.compile(
    r"[\s$]*(?:(?:[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)[\s$]*)+(?:[A-Za-z]\w*\s*=\s*)?", re.IGNORECASE
)
_EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|`|(?m:^[ \t]*>[ \t])")
_SIGN = rf"(?:[^\w\n{MATH}]|_)"  # markdown around a heading
_ANCHORS = re.compile(
    rf"""(?P<mark>^[ \t]*\#\#\#\#[ \t]*(?=[-−+\d.$€£¥(\[{{\\{MATH}]|[A-Za-z]+\W*$)(?!\d+[.)][ \t]))
    | (?P<tag><answer>)
    | (?P<heading>^{_SIGN}*(?:the[ ])?(?:final[ ])?answer{_SIGN}*$)
    | \b(?:answers?|correct[ ](?:option|choice|statement)|final[ ](?:result|value|solution))\b
      (?P<of>[^.:=!?\n]{{0,80}}?)
      (?:\b(?:is|are|was|be|equals?|becomes|comes[ ]out[ ]to)\b(?!['’]|[ ]not\b)|[ ]*[:：=→])
    | 答案(?:是|为|[:：])
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_PART = re.compile(r"\bparts?\b|\bsteps?\b|\bsub|\bfirst\b|\bprevious\b|\(\w\)|\bcase\b", re.IGNORECASE)
_FILLER = re.compile(
    r"(?:[\s:：=→*_]|\b(?:is|are|be|then|therefore|thus|hence|so|simply|just|exactly|precisely|approximately|about|"
    r"around|roughly|equal to|equals|given by|indeed|clearly|actually|now|only|in fact|a total of|option|choice|"
    r"the (?:number|value|integer|fraction|set|interval|point|pair|matrix|option|choice|letter|expression))\b[,:]?)*",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"(?:not\b|un)?(?:clear|known|correct|right|wrong|incorrect|below|above|given|found|as follows|boxed|complete|"
    r"reasonable|verified|confirmed)\b|not\b",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’-]*(?:\s+[A-Za-z'’-]+){0,4}\W*")
_CONCLUSION = re.compile(
    r"[\W_]*(?:therefore|thus|hence|so|consequently|accordingly|in conclusion|finally|in total|altogether|"
    r"we (?:get|have|find|obtain|conclude)|this (?:gives|yields|means|leaves))\b",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"\b(?:is|are|was|were|be|equals?|has|have|had|makes?|made|gives?|gets?|got|yields?|costs?|needs?|takes?|sold|earns?|"
    r"remains?|leaves?|totals?|contains?|obtain|find)\b(?: (?:a total of|exactly|only|equal to|about))?|[=:≈]",
    re.IGNORECASE,
)
_UNIT_WORDS = re.compile(r"(?:[ \t]*(?:[A-Za-z%°][A-Za-z°²³./^]*|\d(?=\W|$))){1,4}(?=\W*$|\s*[,;(])")


def final_answer(response: str) -> str:
    """The final answer's text. Raises :class:`UnreadableResponse` where the response gives none."""
    told = response.rpartition("</think>")[2]
    text = told if told.strip() else response
    boxed = _boxed(text)
    return boxed if boxed is not None else _stated(_EMPHASIS.sub("", text.replace(MATH, " ")))


def _boxed(text: str) -> str | None:
    """What stands in the last complete box, with those it is joined to; None where there is no box."""
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


def _stated(text: str) -> str:
    masked = mask_math(text)
    partial = -1  # where the last answer to a part of the question begins
    for anchor in reversed(list(_ANCHORS.finditer(masked))):
        if anchor["of"] and _PART.search(anchor["of"]):
            partial = max(partial, anchor.start())
            continue
        found = _after(text, masked, anchor)
        if found is not None:
            return found
    found = _last_sentence(text, masked)
    if found is None:
        raise UnreadableResponse("it states no final answer")
    return found


def _after(text: str, masked: str, anchor: re.Match[str]) -> str | None:
    """The answer that ``anchor`` announces; None where no answer follows it."""
    if anchor["tag"]:
        return text[anchor.end() :].partition("</answer>")[0].strip()
    start = anchor.end()
    end = sentence_end(masked, start)
    if not masked[start:end].strip(" \t*_:"):  # the answer has a line of its own
        while start < len(masked) and masked[start] in " \t\r\n*_:.#":
            start += 1
        end = sentence_end(masked, start)
        if start >= len(masked):
            raise UnreadableResponse("it ends before its final answer")
    return _value(text, masked, Span(start, end))


def _value(text: str, masked: str, span: Span) -> str | None:
    """The value that the clause ``span`` gives, which an announcement or a copula stands before."""
    match = _FILLER.match(masked, span.start, span.end)
    start = span.start if match is None else match.end()
    if start >= span.end or _NO_ANSWER.match(masked, start, span.end):
        return None
    found = quantities(masked, start, span.end)
    if found and not masked[start : found[0].start].strip(" \t*_\"'“”") and _is_value(masked, found[0], span.end):
        return _with_unit(text, masked, found[0], span.end)
    if _WORDS.fullmatch(masked, start, span.end):
        return text[start : span.end].strip()
    numbers = [quantity for quantity in found if _has_number(masked, quantity)]
    return _with_unit(text, masked, numbers[-1], span.end) if numbers else None


def _is_value(masked: str, quantity: Span, end: int) -> bool:
    """A number or a formula; symbols alone only where nothing else follows: ``x + y``, ``B``, not ``a dog``."""
    return _has_number(masked, quantity) or not masked[quantity.end : end].strip(" \t*_.)\"'”")


def _has_number(masked: str, quantity: Span) -> bool:
    return re.search(rf"[\d{MATH}\\π∞∅½¼¾⅓⅔]", masked[quantity.start : quantity.end]) is not None


def _with_unit(text: str, masked: str, quantity: Span, end: int) -> str:
    unit = _UNIT_WORDS.match(masked, quantity.end, end)
    return text[quantity.start : quantity.end if unit is None else unit.end()].strip()


def _last_sentence(text: str, masked: str) -> str | None:
    """The value in the last sentence that has one, if it states it rather than mentions it."""
    for span in sentences(masked):
        concludes = _CONCLUSION.match(masked, span.start, span.end) is not None
        numbers = [q for q in quantities(masked, span.start, span.end) if _has_number(masked, q)]
        if concludes or numbers:
            return _conclusion(text, masked, span, numbers, concludes)
    return None


def _conclusion(text: str, masked: str, span: Span, numbers: list[Span], concludes: bool) -> str | None:
    for copula in reversed(list(_copulas(masked, span))):
        following = [q for q in numbers if q.start >= copula and not masked[copula : q.start].strip(" \t*_")]
        if following and (concludes or _ends_sentence(masked, following[0], span.end)):
            return _with_unit(text, masked, following[0], span.end)
    if numbers and (concludes or _is_alone(masked, numbers, span)):
        return _with_unit(text, masked, numbers[-1], span.end)
    return None


def _copulas(masked: str, span: Span) -> Iterator[int]:
    return (match.end() for match in _COPULA.finditer(masked, span.start, span.end))


def _ends_sentence(masked: str, quantity: Span, end: int) -> bool:
    """No clause follows the quantity; a few words can be its unit."""
    return re.fullmatch(r"(?:\s*[\w°%/²³-]+){0,4}\W*", masked[quantity.end : end]) is not None


def _is_alone(masked: str, numbers: list[Span], span: Span) -> bool:
    """The sentence is one quantity, with at most a unit."""
    before = masked[span.start : numbers[0].start].strip(" \t\r\n*_#-•\"'“(")
    return len(numbers) == 1 and not before and _ends_sentence(masked, numbers[0], span.end)
