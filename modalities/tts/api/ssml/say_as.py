"""The English words of a `<say-as>`: what the text inside it is.

Owns each value of `interpret-as` and `format`. What the rules for ordinary text read correctly is
left to them, in a form that they cannot take for anything else. Raises `InvalidRequest`; the reader
adds the place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.process.once import once
from triptych.modalities.tts.api.text.language import english
from triptych.modalities.tts.api.text.numbers import NumberWords, digits

_NUMBER = re.compile(r"([+-]?)(\d[\d,]{0,39}(?:\.\d{1,40})?)\Z")
_ORDINAL = re.compile(r"(\d{1,15})(?:st|nd|rd|th)?\Z", re.IGNORECASE)
_DIGITS = re.compile(r"\d[\d\s.,/-]*\Z")
_TIME = re.compile(
    r"([01]?\d|2[0-4])(:[0-5]\d){1,2}(?: ?[ap]\.?m\.?)?\Z|(0?[1-9]|1[0-2]) ?[ap]\.?m\.?\Z",
    re.IGNORECASE | re.ASCII,
)
_TELEPHONE = re.compile(r"\+?[\d\s().\-/]{1,40}\Z")
_DATE_FORMATS = ("mdy", "dmy", "ymd", "md", "dm", "ym", "my", "d", "m", "y")
_TIME_FORMATS = ("hms12", "hms24")
_SAY = NumberWords()


def spoken_as(text: str, kind: str, form: str) -> str:
    """The words of `text`, an `interpret-as` of `kind` with the format `form`, empty without one.

    Raises `UnsupportedOption` for an unknown kind, `InvalidRequest` for text that is not of it.
    """
    if kind not in KINDS:
        raise UnsupportedOption(f"interpret-as is one of {', '.join(KINDS)}.")
    forms = {"date": _DATE_FORMATS, "time": _TIME_FORMATS}.get(kind, ())
    if form and form not in forms:
        known = f"one of {', '.join(forms)}" if forms else f"for date and time, not for {kind}"
        raise UnsupportedOption(f"format is {known}.")
    words = _date(text, form) if kind == "date" else KINDS[kind](text)
    if words is None:
        raise InvalidRequest(f"{text[:40]!r} cannot be read as {kind}.")
    return words


def _cardinal(text: str) -> str | None:
    match = _NUMBER.match(text)
    if match is None:
        return None
    return {"-": "minus ", "+": "plus "}.get(match[1], "") + _SAY.number(match[2])


def _ordinal(text: str) -> str | None:
    match = _ORDINAL.match(text.replace(",", ""))
    return None if match is None else _SAY.ordinal(int(match[1]))


def _digits(text: str) -> str | None:
    return digits(text) if _DIGITS.match(text) else None


def _telephone(text: str) -> str | None:
    """Digit by digit, with a comma between the groups."""
    groups = re.findall(r"\d+", text)
    if not groups or _TELEPHONE.match(text) is None:
        return None
    return ("plus " if text.startswith("+") else "") + ", ".join(map(digits, groups))


def _characters(text: str) -> str | None:
    names = [_character(char) for char in text if not char.isspace()]
    return " ".join(name for name in names if name) if all(names) else None


def _character(char: str) -> str:
    """The name of a character, empty if it has none."""
    if char.isascii() and char.isdigit():
        return digits(char)
    return char.upper() if char.isalpha() else _sign_names().get(char, "")


@once
def _sign_names() -> Mapping[str, str]:
    lang = english()
    own = {",": "comma", ";": "semicolon", "!": "exclamation mark", "'": "apostrophe", '"': "quote"}
    own |= {"(": "open bracket", ")": "close bracket", "*": "asterisk", "$": "dollar"}
    return {**lang.symbols, **lang.address_signs, **own}


def _time(text: str) -> str | None:
    return text if _TIME.match(text) else None


def _date(text: str, form: str) -> str | None:
    """The date as the rules for text read it in any dialect: "March 4, 2024"."""
    if not form:
        return text if any(map(str.isdecimal, text)) else None
    parts = re.findall(r"[^\s/.,-]+", text)
    if len(parts) != len(form):
        return None
    named = dict(zip(form, parts, strict=True))
    day, month, year = named.get("d"), _month(named.get("m")), named.get("y")
    is_day = day is None or (day.isdecimal() and len(day) <= 2 and 1 <= int(day) <= 31)
    is_year = year is None or (year.isdecimal() and len(year) in (2, 4))
    if not is_day or not is_year or month == "":
        return None
    if month is None:
        return _SAY.ordinal(int(day)) if day else _SAY.year(int(_full_year(year or "0")))
    head = f"{month} {int(day)}" if day else month
    return head if year is None else f"{head}{',' if day else ''} {_full_year(year)}"


def _month(written: str | None) -> str | None:
    """The name of a month, empty for a text that is none."""
    if written is None:
        return None
    months = english().words.months
    if written.isdecimal():
        number = int(written) if len(written) <= 2 else 0
        return months[number - 1] if 1 <= number <= 12 else ""
    known = (name for name in months if name[:3].lower() == written[:3].lower())
    return next(known, "")


def _full_year(year: str) -> str:
    """A year of two digits is of the hundred years until 2050, as in ordinary text."""
    if len(year) == 4:
        return year
    return f"{'19' if int(year) > 50 else '20'}{year}"


KINDS: Mapping[str, Callable[[str], str | None]] = MappingProxyType(
    {
        "characters": _characters,
        "spell-out": _characters,
        "cardinal": _cardinal,
        "number": _cardinal,
        "ordinal": _ordinal,
        "digits": _digits,
        "date": lambda text: _date(text, ""),
        "time": _time,
        "telephone": _telephone,
    }
)
"""The words of a text by its kind; `None` for a text that is not of the kind."""
