"""Rewrites numerals with other countries' separators to the English form.

Owns which numerals those are, for the whole text and before any rule reads it: "1'000" and
"1.000,50" become "1,000" and "1,000.50", with unchanged length. A numeral that is also valid in
English ("1.000", "1,5") stays, unless its context decides otherwise. Knows nothing of how numerals
are read.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import Language, alternatives
from triptych.modalities.tts.api.text.rules import word_before

_APOSTROPHES = re.compile(r"(?<![\w.,])\d{1,3}(?:'\d{3}){1,12}(?!\d|'\d)")
_POINTS = re.compile(r"(?<![\w.,])\d{1,3}(?:\.\d{3}){1,12}(?:,\d{1,40})?(?!\w|[.,]\d)")
_SWAPPED = str.maketrans("., '", ",.,,")
_MAX_OCTET = 255
_OTHER_MEANINGS = frozenset(["in", "B", "C", "F", "M", "x", "×", '"', "'", "′", "″"])
"""Units that also follow the numerals of a list ("rows 1,5 in the table")."""


class Grouping:
    """Rewrites the numerals of a text. Stateless, thread-safe."""

    def __init__(self, language: Language) -> None:
        money = alternatives(language.currencies)
        signs = {**language.units, **language.tight_units}
        names = {name for pair in signs.values() for name in pair if name not in signs}
        coins = {name for coin in language.currencies.values() for name in coin if name}
        units = alternatives((signs.keys() | names | coins) - _OTHER_MEANINGS)
        large = alternatives(word for word in language.magnitudes if len(word) > 3)
        before = rf"(?P<before>(?<!\w){money} ?)?(?<![\w.,])(?<!\d )"
        after = rf"(?P<after> ?(?:{money}|{units}|{large}|[%‰])(?!\w))?"
        comma = r"\d{1,15},\d{1,2}"
        self._commas = re.compile(
            rf"{before}(?P<numeral>{comma}(?:[-–]{comma})?)(?!\w|[.,]\d){after}"
        )
        self._spaces = re.compile(
            rf"{before}(?P<numeral>[1-9]\d{{0,2}}(?: \d{{3}}){{1,12}}(?:,\d{{1,2}})?)"
            rf"(?!\w| \d|[.,]\d){after}"
        )
        self._phone_cues = language.words.phone_cues

    def __call__(self, text: str) -> str:
        """`text` with English numerals; its length is unchanged."""
        text = _APOSTROPHES.sub(lambda match: match[0].translate(_SWAPPED), text)
        text = _POINTS.sub(_with_points, text)
        text = self._spaces.sub(self._with_spaces, text)
        return self._commas.sub(_with_comma, text)

    def _with_spaces(self, match: re.Match[str]) -> str:
        """Join groups that end in 000, or that count something; other groups may be two numbers."""
        groups = match["numeral"].partition(",")[0].split(" ")
        is_of_something = match["before"] or match["after"] or "," in match["numeral"]
        is_one = groups[-1] == "000" or (len(groups) > 2 and is_of_something)
        if not is_one or word_before(match).lower() in self._phone_cues:
            return match[0]
        return _to_english(match)


def _with_points(match: re.Match[str]) -> str:
    """Several points group digits, except in an IP address; a single one only before a comma."""
    groups = match[0].split(".")
    if "," not in match[0]:
        is_octet = [group == str(int(group)) and int(group) <= _MAX_OCTET for group in groups]
        if len(groups) == 2 or (len(groups) == 4 and all(is_octet)):
            return match[0]
    return match[0].translate(_SWAPPED)


def _with_comma(match: re.Match[str]) -> str:
    """A comma is decimal in money and measures, and after a lone zero."""
    is_decimal = match["before"] or match["after"] or match["numeral"].startswith("0,")
    return _to_english(match) if is_decimal else match[0]


def _to_english(match: re.Match[str]) -> str:
    start, end = (at - match.start() for at in match.span("numeral"))
    return match[0][:start] + match["numeral"].translate(_SWAPPED) + match[0][end:]
