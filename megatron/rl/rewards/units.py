"""Units of measure by one name each, so that 5 cm is told apart from 5 m."""

import re

_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre kms",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm",
    "kg": "kilogram kilo",
    "lb": "pound lbs",
    "oz": "ounce",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "day": "",
    "week": "",
    "month": "",
    "year": "yr",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "gal": "gallon",
    "deg": "degree",
    "degc": "degreec celsius",
    "degf": "degreef fahrenheit",
    "rad": "radian",
    "mph": "",
    "kmh": "kph kmph",
    "am": "",
    "pm": "",
    "$": r"dollar usd buck",
    "cent": "",
    "eur": "euro €",
    "gbp": "£",
    "jpy": "yen ¥",
    "inr": "rupee rs ₹",
}
_CANONICAL = {alias: name for name, aliases in _NAMES.items() for alias in (name, *aliases.split())}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_TOKEN = re.compile(r"[a-z]+|[$€£¥₹]|\d|/")


def canonical_unit(written: str) -> str:
    """One name for a unit however it is written (``square meters``, ``m^2``), or "" where it is not known."""
    parts: list[str] = []
    power = ""  # of the unit that follows
    for token in _TOKEN.findall(re.sub(r"([ap])\.m\.?", r"\1m", written.lower().replace("\\", ""))):
        if token in ("/", "per"):
            parts.append("/")
        elif token in ("squared", "cubed") or token.isdigit():
            if not parts:
                return ""
            parts.append(_POWERS.get(token, token))
        elif token in _POWERS:
            power = _POWERS[token]
        else:
            name = _CANONICAL.get(token) or _CANONICAL.get(token.removesuffix("s"))
            if name is None:
                return ""
            parts += [name, power] if power else [name]
            power = ""
    joined = " ".join(parts)
    return {"mi / h": "mph", "km / h": "kmh"}.get(joined, joined)


def same_unit(one: str, other: str) -> bool:
    """Whether two canonical names can mean one unit; "" can mean any, and a degree is of angle or temperature."""
    return not one or not other or one == other or {one, other} in ({"deg", "degc"}, {"deg", "degf"})
