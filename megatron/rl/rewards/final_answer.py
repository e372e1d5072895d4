"""What a response gives as its final answer: the text as it stands, never a number from elsewhere.

In this order: the last complete box; else the last statement that calls itself the answer; else the last sentence
that states a value. Of a response that thinks in ``<think>`` tags only what follows them counts, if anything does.
"""

import bisect
import re

from megatron.rl.rewards.boxes import boxed_answer
from megatron.rl.rewards.prose import MATH, Span, mask_math, quantities, sentence_end, sentences
from megatron.rl.rewards.protocol import UnreadableResponse

_EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])|`|(?m:^[ \t]*>[ \t])")
_MARKER = re.compile(r"<\|[^|<>\n]{1,40}\|>")  # of a chat template: <|im_end|>
_SUBJECT_CHARACTERS = 200
_LOOK_BACK = 20  # characters in which the comma before a clause is looked for
_NOTHING = re.compile(r"[ \t*_]*")
_SIGN = rf"(?:[^\w\n{MATH}]|_)"  # markdown around a heading
_ANCHORS = re.compile(
    rf"""(?P<mark>^[ \t]*\#\#\#\#[ \t]*(?=[-−+\d.$€£¥(\[{{\\{MATH}]|[A-Za-z]+\W*$)(?!\d+[.)][ \t]))
    | (?P<tag><(?:final[_ ])?answer>)
    | (?P<heading>^{_SIGN}*(?:the[ ])?(?:final[ ])?answer{_SIGN}*$)
    | \b(?:ans(?:wers?)?|correct[ ](?:option|choice|statement)|final[ ](?:result|value|solution))\b
      (?P<of>[^.:=!?\n]{{0,80}}?)
      (?:\b(?:is|are|was|be|equals?|becomes|comes[ ]out[ ]to)\b(?!['’]|[ ]not\b)|[ ]*[:：=→])
    | ^{_SIGN}*(?:final[ ])?answer[ ]+(?=[-−\d$\\({MATH}])
    | 答案(?:是|为|[:：])
    | (?P<before>\bis[ ](?:the|our|my)[ ](?:(?:final|correct|right|best)[ ])*(?:answer|option|choice)\b
            (?![ ]*[:：=]|[ ](?:is|to)\b)
        | (?:(?<=[A-J])|(?<=[A-J]\)))[ ]is[ ](?:correct|right)\b)
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
_LINE_START = re.compile(r"(?:[\s*_:.#]|[-•]\s)*")
_ANNOUNCED = re.compile(r"(?:^|\b(?:is|are|equals|by)|[:=])[ \t*_:]*$")
_NO_ANSWER = re.compile(
    r"(?:not\b|un)?(?:clear|known|correct|right|wrong|incorrect|below|above|given|found|as follows|boxed|complete|"
    r"reasonable|verified|confirmed)\b|not\b",
    re.IGNORECASE,
)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’-]*(?:\s+[A-Za-z'’-]+){0,4}\W*")
_CONCLUSION = re.compile(
    r"(?:therefore|thus|hence|so|consequently|accordingly|in conclusion|finally|then|in total|altogether|"
    r"we (?:get|have|find|obtain|conclude)|this (?:gives|yields|means|leaves))\b",
    re.IGNORECASE,
)
_ASSUMPTION = re.compile(
    r"\b(?:let|suppose|assum\w+|if|consider|set|given|since|try|maybe|perhaps|hmm|wait|check|verify|equation)\b",
    re.IGNORECASE,
)
_COPULA = re.compile(
    r"(?:\b(?:is|are|was|were|be|equals?|has|have|had|makes?|made|gives?|gets?|got|yields?|costs?|needs?|takes?|sold|"
    r"earns?|remains?|leaves?|totals?|contains?|obtain|find|"
    r"(?:comes?|amounts?|adds up|evaluates|simplifies|reduces)(?: out)? to)\b|(?<=\b[Ii]t)['’]s\b)"
    r"(?: (?:a total of|exactly|only|equal to|about|them|him|her|us|it))?|[=:≈]",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\W*\(?[A-J]\)?\W*")
_UNIT_WORDS = re.compile(
    r"(?!\s*(?:and|or|because|since|so|as|if|when|where|which|but|for|by|in|is|are)\b)"
    r"(?:[ \t]*(?:[A-Za-z%°][A-Za-z°²³./^]*)){1,4}(?=\W*$|\s*[,;(])"
)


def final_answer(response: str) -> str:
    """The final answer's text. Raises :class:`UnreadableResponse` where the response gives none."""
    response = _MARKER.sub("\n", response)
    told = response.rpartition("</think>")[2]
    text = told if told.strip() else response
    boxed = boxed_answer(text)
    return boxed if boxed is not None else _stated(_EMPHASIS.sub("", text.replace(MATH, " ")))


def _stated(text: str) -> str:
    masked = mask_math(text)
    for anchor in reversed(list(_ANCHORS.finditer(masked))):
        if anchor["of"] and _PART.search(anchor["of"]):
            continue
        found = _after(text, masked, anchor)
        if found is not None:
            return found
    found = _alone(text) or _last_sentence(text, masked)
    if found is None:
        raise UnreadableResponse("it states no final answer")
    return found


def _alone(text: str) -> str | None:
    """A response of a letter or a few words, which is an answer by itself: ``(B)``, ``No solution.``"""
    text = text.strip(" \t\r\n*_.\"'")
    is_answer = _WORDS.fullmatch(text) and not re.search(r"\?$|\banswer\b", text)
    return text if is_answer or _CHOICE.fullmatch(text) else None


def _after(text: str, masked: str, anchor: re.Match[str]) -> str | None:
    """The answer that ``anchor`` announces; None where no answer follows it."""
    if anchor["tag"]:
        return _tagged(text[anchor.end() :].partition("</")[0].strip())
    if anchor["before"]:
        return _before(text, masked, anchor.start())
    start = anchor.end()
    end = sentence_end(masked, start)
    if _ANNOUNCED.search(masked[start:end]) and not quantities(masked, start, end):  # the answer has a line of its own
        start = _LINE_START.match(masked, end).end()  # type: ignore[union-attr]
        end = sentence_end(masked, start)
        if start >= len(masked):
            raise UnreadableResponse("it ends before its final answer")
    return _value(text, masked, Span(start, end))


def _tagged(content: str) -> str:
    try:
        return _stated(content)
    except UnreadableResponse:
        return content


def _before(text: str, masked: str, end: int) -> str | None:
    """The subject of "... is the answer"."""
    found = quantities(masked, end - _SUBJECT_CHARACTERS if end > _SUBJECT_CHARACTERS else 0, end)
    adjacent = found and not masked[found[-1].end : end].strip(" \t*_)\"'”")
    return text[found[-1].start : found[-1].end] if adjacent else None


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
    return _conclusion(text, masked, Span(start, span.end), numbers, concludes=True)


def _is_value(masked: str, quantity: Span, end: int) -> bool:
    """A number or a formula; symbols alone only where the clause ends with them: ``x + y``, ``B``, not ``a dog``."""
    rest = masked[quantity.end : end].strip(" \t*_.)\"'”,")
    return _has_number(masked, quantity) or not rest or re.match(r"(?:because|since)\b", rest) is not None


def _has_number(masked: str, quantity: Span) -> bool:
    return re.search(rf"[\d{MATH}\\π∞∅½¼¾⅓⅔⁰¹²³⁴-⁹₀-₉ℝℤℕℚℂ]", masked[quantity.start : quantity.end]) is not None


def _with_unit(text: str, masked: str, quantity: Span, end: int) -> str:
    unit = _UNIT_WORDS.match(masked, quantity.end, end)
    return text[quantity.start : quantity.end if unit is None else unit.end()].strip()


def _last_sentence(text: str, masked: str) -> str | None:
    """The value in the last sentence that has one, if it states it rather than mentions it."""
    for span in sentences(masked):
        clause = _concluding_clause(masked, span)
        concludes, span = clause is not None, clause or span
        numbers = [q for q in quantities(masked, span.start, span.end) if _has_number(masked, q)]
        if concludes or numbers:
            return _conclusion(text, masked, span, numbers, concludes)
    return None


def _concluding_clause(masked: str, span: Span) -> Span | None:
    """From the last "so" or its like at the beginning of the sentence or of a clause: ``..., so it is 5``."""
    for match in reversed(list(_CONCLUSION.finditer(masked, span.start, span.end))):
        start = max(span.start, match.start() - _LOOK_BACK)
        before = masked[start : match.start()].strip(" \t*_-")
        if before.endswith((",", ";")) or (not before and start == span.start):
            return Span(match.start(), span.end)
    return None


def _conclusion(text: str, masked: str, span: Span, numbers: list[Span], concludes: bool) -> str | None:
    starts = [quantity.start for quantity in numbers]
    for copula in reversed(list(_COPULA.finditer(masked, span.start, span.end))):
        place = bisect.bisect_left(starts, copula.end())
        if place == len(numbers) or not _NOTHING.fullmatch(masked, copula.end(), starts[place]):
            continue
        if concludes or _ends_sentence(masked, numbers[place], span.end):
            return _with_unit(text, masked, numbers[place], span.end)
    if numbers and (concludes or _is_alone(masked, numbers, span) or _is_computed(text, masked, numbers[-1], span)):
        return _with_unit(text, masked, numbers[-1], span.end)
    return None


def _ends_sentence(masked: str, quantity: Span, end: int) -> bool:
    """No clause follows the quantity; a few words can be its unit."""
    rest = masked[quantity.end : end]
    return re.fullmatch(r"(?:\s*[\w°%/²³-]+){0,4}(?:,\s*(?:which|as|where)\b.*|\W*)", rest) is not None


def _is_alone(masked: str, numbers: list[Span], span: Span) -> bool:
    """The sentence is one quantity, with at most a unit."""
    before = masked[span.start : numbers[0].start].strip(" \t\r\n*_#-•\"'“(")
    return len(numbers) == 1 and not before and _ends_sentence(masked, numbers[0], span.end)


def _is_computed(text: str, masked: str, quantity: Span, span: Span) -> bool:
    """The sentence ends in an equation, and it is none that it assumes."""
    assumes = _ASSUMPTION.search(masked, span.start, span.end)
    return "=" in text[quantity.start : quantity.end] and assumes is None and _ends_sentence(masked, quantity, span.end)
