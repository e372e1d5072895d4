"""The many ways to write an answer, made one: LaTeX that math-verify reads whole, and what stood around it."""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from megatron.rl.rewards.units import canonical_unit

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u3000\t\r\n", " "),
        **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "±": r"\pm ",
        "∞": r"\infty ",
        "π": r"\pi ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "∈": r"\in ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
    }
)
_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_LONGEST = 2000  # characters; what is longer is no answer, and would take the parser for ever
# (pattern, replacement), in order: spacing, styles and synonyms, none of which changes what is meant.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[\[\]()]|(?<!\\)\$|\\\$(?=\s*$)", " "),  # formula delimiters
        (r"\{,\}|,\\!|,\{\}", ","),
        (r"\\!|\\(?:displaystyle|textstyle|limits|nolimits|strut|therefore)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\(?:q?quad|enspace|thinspace)(?![A-Za-z])|\\[hv]space\*?\{[^{}]*\}", " "),
        (r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])", ""),
        (r"\\color\{[^{}]*\}", ""),
        (r"\\textcolor\{[^{}]*\}", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])|\\text\{\s*(?:empty set|null set)\s*\}", r"\\emptyset "),
        (r"\\degrees?(?![A-Za-z])", r"^\\circ "),
        (r"\{\\(?:rm|bf|it|sf)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|textbf)\s*(?=\{[^{}]*[\\{])", ""),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|boldsymbol|bm|textbf|textit|textrm|textnormal|mbox|emph)\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\s*\{\s*\}", " "),
        (r"(\d)\s*\^\s*\{\s*(?:\\text\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}|(\d)(?:st|nd|rd|th)\b", r"\1\2"),
        (r"\{(align|gather|equation)\*\}", r"{\1}"),
        (r"√\s*\(([^()]*)\)|√\s*(\d+|[A-Za-z])", r"\\sqrt{\1\2}"),
        (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)|(?<![A-Za-z\\])sqrt\s*(\d+)", r"\\sqrt{\1\2}"),
        (r"(?<![A-Za-z\\])(pi|infinity|infty)(?![A-Za-z])", lambda m: r"\pi " if m[1] == "pi" else r"\infty "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"(?<!\\)%", r"\\%"),
        (r"\^\(([^()]*)\)", r"^{\1}"),
        (r"\^(-?\d+(?:\.\d+)?)", r"^{\1}"),
        (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(\d)\s*[xX]\s*10\s*\^", r"\1 \\times 10^"),
    )
]
_PLAIN_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LABEL = re.compile(
    r"(?:(?:option|choice)\s+)?(?:[(\[]\s*(?P<a>[A-J])\s*[)\]]|(?P<b>[A-J])\s*[).:](?=\s|$)|(?-i:(?P<c>[A-J]))(?=\s*$))"
    r"\s*[.:,]?\s*(?P<value>(?:[\w\\\"'{]|[-.]\d).*|\(.*)?|(?:option|choice)\s+(?P<d>[A-J])(?:\s*[.:]\s*(?P<more>.*))?",
    re.IGNORECASE,
)
_EDGES = " \t\n*_\"'`“”,;:"
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[^{}]*\}")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d]|,\d)")
_SPACED_THOUSANDS = re.compile(r"([-+]?)(\d{1,3}(?: \d{3})+)(\.\d+)?")
_MIXED = re.compile(r"(?<![\d.}])(\d+)(?:\s+|\s*-\s*(?=\d+/\d+$))(\d+)\s*/\s*(\d+)(?![\d.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_JUXTAPOSED = re.compile(r"(?:^|[=,(+*/-])\s*\d[\d.]*\s+\d")
_BASE = re.compile(r"(-?\d+)_\s*(?:\{(?:\\text\{)?\s*(\w+)\s*\}?\}|(\d+))")
# The k of 2k\pi, k \in \mathbb{Z} is any integer by itself.
_RANGE = re.compile(r",\s*(?:\\text\{\s*(?:where|for|with)\s*\})?\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[ZNQR]\}?\s*$")
_LINES = re.compile(
    r"(?:\\left\\\{\s*)?\\begin\{(?P<name>cases|aligned|align|equation|gather|split)\}(?P<rows>.*?)"
    r"\\end\{(?P=name)\}(?:\s*\\right\.)?"
)
_CONGRUENCE = re.compile(
    r"(?:.*?\\equiv\s*)?(.+?)\s*(?:\\pmod|\(?\\[bm]od|\(?\\text\{\s*mod\s*\})\s*\{?\s*(\w+)\s*[})]*"
)
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+){2,}")
_PERCENT = re.compile(r"(?:\\?%|\\text\{\s*(?:\\?%|percent(?:age)?(?: points?)?|pct)\s*\}|\b(?:percent|pct)\b)\s*$")
_CURRENCY = re.compile(r"^([-+]?)\s*(?:US|CA|A)?(\\\$|\$|€|£|¥|₹|\bRs\.?|\bUSD|\bEUR)\s*(?=[-+\d.\\])", re.IGNORECASE)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*(?:\\text\{\s*)?([CF]?)\s*\}?\s*$")
_UNIT_TEXT = re.compile(r"((?:\s*(?:/|\\cdot)?\s*\\text\{[^{}]*\}(?:\s*\^\s*\{?-?\d\}?)?)+)\s*$")
_UNIT_PLAIN = re.compile(
    r"(?:(?<=[\d})%])|(?<=\\pi)(?= ))(\s*[A-Za-z][A-Za-z .\-]*(?:\s*/\s*[A-Za-z]+)?(?:\^\{?\d\}?)?)$"
)
_UNIT_IN_LIST = re.compile(r"\\text\{([^{}]*)\}|(?<=[\d})])\s*([A-Za-z]{2,})(?![A-Za-z])")
_NO_UNIT = re.compile(
    r"\s*(?:and|or|if|for|when|where|with|to|mod|choose|is|are|plus|minus|squared|cubed|factorial|halves|thirds|"
    r"fourths|fifths|sixths|eighths|tenths)\b",
    re.IGNORECASE,
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMERAL = re.compile(rf"(\d)\s*(?:\\text\{{\s*)?({'|'.join(_POWERS_OF_TEN)})\b(\s*\}})?", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]{4,}")
_FUNCTIONS = {"sqrt", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan", "infty", "frac", "sech"}
_SHORT_WORDS = {"yes", "no", "odd", "even", "all", "none", "true", "one", "two", "red", "blue", "on", "am", "pm", "is"}
_ARTICLES = re.compile(r"\b(?:the|a|an|and)\b")
_JOINED = re.compile(r",?\s*\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_LIST = re.compile(rf",\s|{_JOINED.pattern}")
_TELLS = re.compile(r"^(?:\\text\{)?[A-Za-z][A-Za-z '()-]*?(?::|\bis\b|\bare\b)\s*\}?\s*[:=]?\s*(?=\S)")


@dataclass(frozen=True)
class Reading:
    """What an answer says."""

    forms: tuple[str, ...]  # LaTeX; several where the writing leaves open which is meant, as "(A) 5" does
    percent: bool = False
    unit: str = ""  # canonical; empty where there is none, or none that is known
    base: str = ""  # of the number system: 2516_8


def read_answer(text: str) -> Reading:
    """Reads an answer written in LaTeX or plainly.

    Raises ValueError, with a few words of why, where it says nothing that can be compared.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text)} characters")
    text = _rewritten(text)
    if not text:
        raise ValueError("it is empty")
    label = _LABEL.fullmatch(_without_text(text))
    if label is not None:
        letter = next(label[name] for name in "abcd" if label[name]).upper()
        value = (label["value"] or label["more"] or "").strip()
        return Reading((rf"\text{{{letter}}}", *(_read_value(value).forms if value else ())))
    return _read_value(text)


def _rewritten(text: str) -> str:
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0]).replace('−', '-')}}}", text)
    text = _SUBSCRIPT.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _trimmed(unicodedata.normalize("NFKC", text.translate(_SIGNS)))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)  # type: ignore[arg-type]
    text = _PLAIN_TEXT.sub(lambda m: m[0] if re.search(r"[A-Za-z]{2,}|\\", m[1]) else f" {m[1]} ", text)
    text = _NUMERAL.sub(_numeral, text)
    text = _RANGE.sub("", text)
    text = _LINES.sub(_one_line, text)
    text = re.split(r"\\(?:implies|Rightarrow|Longrightarrow)(?![A-Za-z])", text)[-1]
    return _trimmed(re.sub(r"\s+", " ", text))


def _trimmed(text: str) -> str:
    """Without white space, punctuation, quotes and emphasis at the ends."""
    before = None
    while text != before:
        before = text
        text = text.strip(_EDGES).rstrip(".").removesuffix("\\\\").removeprefix(r"\approx")
        if re.match(r"\.(?!\d)", text):
            text = text[1:]
    return text


def _read_value(text: str) -> Reading:
    text = _without_name(text)
    if (congruence := _CONGRUENCE.fullmatch(text)) is not None:
        return Reading((rf"\text{{{re.sub(r'[^\w-]', '', congruence[1])}mod{congruence[2]}}}",))
    text, percent, unit = _without_unit(text)
    if _LIST.search(text):
        text = _UNIT_IN_LIST.sub(lambda m: "" if canonical_unit(m[1] or m[2]) else m[0], text)
    base = _BASE.fullmatch(text)
    if base is not None:
        return Reading((base[1],), base=base[2] or base[3])
    if _words(text):
        return Reading((_as_words(text),), unit=unit)
    if re.fullmatch(r"[A-Za-z]{2,3}", text):
        forms = (_as_words(text),) if text.lower() in _SHORT_WORDS else (text, _as_words(text))
        return Reading(forms, unit=unit)
    return Reading((_as_mathematics(text),), percent, unit)


def _without_name(text: str) -> str:
    r"""``5`` of ``Area = 5``, ``The answer is 5`` and ``P(\text{win}) = 5``."""
    name, sign, value = text.rpartition("=")
    if sign and name[-1:] not in "<>!" and _words(name) and value.strip() and not _words(_without_unit(value)[0]):
        return _trimmed(value)
    told = _TELLS.match(text)
    return (_trimmed(text[told.end() :]) or text) if told is not None and _words(told.group()) else text


def _without_unit(text: str) -> tuple[str, bool, str]:
    """The bare value, whether it is a percentage, and its unit's canonical name."""
    if (currency := _CURRENCY.match(text)) is not None:
        return _without_unit(currency[1] + text[currency.end() :])[0], False, canonical_unit(currency[2])
    if (percent := _PERCENT.search(text)) is not None and percent.start() > 0 and not _LIST.search(text):
        return text[: percent.start()].strip(), True, ""
    if (degrees := _DEGREES.search(text)) is not None and degrees.start() > 0:
        return text[: degrees.start()].strip(), False, canonical_unit(f"degree{degrees[1]}")
    for pattern in (_UNIT_TEXT, _UNIT_PLAIN):
        found = pattern.search(text)
        if found is None or not text[: found.start()].strip():
            continue
        written = _without_text(found[1])
        unit, before = canonical_unit(written), text[: found.start()].strip()
        is_spaced = found[1][0] in " \\" and len(written.strip()) > 2
        if not _NO_UNIT.match(written) and (unit or (is_spaced and re.search(r"(?:[\d)}!%]|\\pi)$", before))):
            if len(written.strip()) == 1 and pattern is _UNIT_PLAIN:
                continue  # 5 m is as well five times m
            value, percent_before, _ = _without_unit(before) if before.endswith("%") else (before, False, "")
            return value, percent_before, unit
    return text, False, ""


def _without_text(text: str) -> str:
    return re.sub(r"\s+", " ", _PLAIN_TEXT.sub(r" \1 ", text)).strip()


def _words(text: str) -> list[str]:
    """The words of the language, not of mathematics, in ``text``."""
    bare = _ENVIRONMENT.sub(" ", _JOINED.sub(",", text))
    inside = [word for content in _PLAIN_TEXT.findall(bare) for word in re.findall(r"[A-Za-z]{2,}", content)]
    outside = re.sub(r"\\[A-Za-z]+", " ", _PLAIN_TEXT.sub(" ", bare))
    return inside + [word for word in _WORD.findall(outside) if word not in _FUNCTIONS and not word.isupper()]


def _as_words(text: str) -> str:
    """A name for math-verify to compare: letters and digits, without articles."""
    plain = _ARTICLES.sub(" ", _without_text(text).lower().replace("n't", " not"))
    return rf"\text{{{''.join(re.findall(r'[a-z0-9]', plain))}}}"


def _as_mathematics(text: str) -> str:
    text = _JOINED.sub(", ", text)
    if not re.search(r"[(\[{]", text):
        text = _THOUSANDS.sub(lambda m: m[1].replace(",", ""), text)
    if (spaced := _SPACED_THOUSANDS.fullmatch(text)) is not None:
        text = spaced[1] + spaced[2].replace(" ", "") + (spaced[3] or "")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _REPEATING.sub(_repeating, text)
    if _RATIO.fullmatch(text):
        text = f"({text.replace(':', ',')})"
    if _JUXTAPOSED.search(text) and not re.search(r"\\frac|\\log|\\binom", text):
        raise ValueError("numbers stand side by side")
    return text


def _one_line(match: re.Match[str]) -> str:
    """The lines of a system of equations as a list; of a calculation, which goes on with "=", the last value."""
    rows = [row for row in (row.replace("&", " ").strip() for row in match["rows"].split(r"\\")) if row]
    if any(row.startswith("=") for row in rows):
        return rows[-1].rpartition("=")[2]
    return ", ".join(row.rstrip(".,;") for row in rows)


def _numeral(match: re.Match[str]) -> str:
    """1.5 million is 1.5 x 10^6; what else stands in the same text command stays there."""
    opened = r"\text{" if r"\text" in match.group() and not match[3] else ""
    return rf"{match[1]} \times 10^{{{_POWERS_OF_TEN[match[2].lower()]}}} {opened}"


def _repeating(match: re.Match[str]) -> str:
    r"""0.1\overline{6} is 1/6."""
    whole, fixed, period = match.groups()
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed or "0"), shift) + Fraction(int(period), (10 ** len(period) - 1) * shift)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
