"""The languages besides English that a text may be read in, as read from `languages/`.

Owns their names and tags, the form of their tables, and the words of their numbers. English has
more: its rules are in modules of their own. Knows neither voices nor models.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import msgspec
from typing_extensions import TypeIs

from triptych.core.process.typed import convert
from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.rules import Rule
from triptych.modalities.tts.api.text.spelling import Spelling

Dialect = Literal["us", "uk"]
Reading = Literal["us", "uk", "es", "fr", "hi", "it", "ja", "pt", "zh"]
"""How letters are read: as American or British English, or as another language."""

_READINGS: Mapping[str, Reading] = {
    "en-us": "us",
    "en-gb": "uk",
    "pt": "pt",
    "pt-br": "pt",
    "cmn": "zh",
    "es": "es",
    "fr": "fr",
    "hi": "hi",
    "it": "it",
    "ja": "ja",
    "zh": "zh",
}
_REGIONLESS = frozenset(("es", "fr", "hi", "it", "ja", "zh"))
_MAX_WORD_DIGITS = 15  # longer numbers are read digit by digit


def reading_of(tag: str, native: Reading = "us") -> Reading | None:
    """The reading of a language tag such as `pt-BR`; `None` for a language without one.

    European Portuguese has none: it is not what the table reads. English of no region, or of one
    without tables such as `en-AU`, is `native` if that is English, else American.
    """
    tag = tag.strip().lower().replace("_", "-")
    primary = tag.partition("-")[0]
    if primary == "en" and tag not in _READINGS:
        return native if is_english(native) else "us"
    return _READINGS.get(tag) or (_READINGS[primary] if primary in _REGIONLESS else None)


@lru_cache
def _small_words(listed: str) -> tuple[str, ...]:
    """The number words of a list with commas, whose lines may break within a word."""
    return tuple(" ".join(words.split()) for words in listed.split(","))


def is_english(reading: Reading | None) -> TypeIs[Dialect]:
    """Whether a text is read as English."""
    return reading in ("us", "uk")


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number words: those below a hundred, and the scales from the greatest, for one and for more.

    `joiner` precedes the last part of a number, and of one without spaces, a part after a scale
    that is passed over; `exact` has words for single numbers, and `before_scale` pairs the last
    word of a number with its form before a scale. `decimal` is the decimal mark, said as `point`.
    A language without `small` keeps its digits.
    """

    small: str
    scales: tuple[tuple[int, str, str], ...]
    decimal: str
    point: str
    minus: str
    joiner: str
    exact: dict[str, str]
    before_scale: dict[str, str] = {}

    def cardinal(self, n: int) -> str:
        """A whole number in words."""
        if not self.small:
            return str(n)
        small = _small_words(self.small)
        if n < len(small):
            return small[n]
        if exact := self.exact.get(str(n)):
            return exact
        value, one, many = next(scale for scale in self.scales if scale[0] <= n)
        head, rest = divmod(n, value)
        words = one if head == 1 else many.format(self._before_scale(head))
        if not rest:
            return words
        return f"{words}{self._joiner(value, rest)}{self.cardinal(rest)}"

    def _before_scale(self, n: int) -> str:
        before, space, last = self.cardinal(n).rpartition(" ")
        return f"{before}{space}{self.before_scale.get(last, last)}"

    def _joiner(self, value: int, rest: int) -> str:
        if not self._space:
            return self.joiner if rest < value // 10 else ""
        is_last = value <= 1000 and (rest < 100 or rest % 100 == 0)
        return self.joiner if is_last else " "

    def number(self, whole: str, fraction: str = "") -> str:
        """A numeral in words; its digits one by one where it is long or begins with a zero."""
        is_code = len(whole) > _MAX_WORD_DIGITS or (whole[0] == "0" and len(whole) > 1)
        words = self.digits(whole) if is_code else self.cardinal(int(whole))
        if not fraction:
            return words
        is_pair = self.decimal == "," and len(fraction) == 2 and fraction[0] != "0"
        parts = self.cardinal(int(fraction)) if is_pair else self.digits(fraction)
        return self._space.join((words, self.point, parts))

    def digits(self, numeral: str) -> str:
        """Each digit by itself."""
        return self._space.join(self.cardinal(int(digit)) for digit in numeral)

    @property
    def _space(self) -> str:
        return " " if " " in self.joiner else ""


class Tongue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language's tables. One whose spelling does not give its sound has no `spelling`."""

    name: str
    numbers: Numbers
    signs: dict[str, str]
    abbreviations: dict[str, str]
    spelling: Spelling | None = None

    def rules(self) -> Iterator[Rule]:
        """The rules of digits: money, shares, dates, times of day and numbers."""
        numeral, currency = self._numeral, self._currency
        yield from self._money_rules()
        yield Rule(re.compile(rf"{numeral}\s?{currency}(?!\s?\d)"), self._money)
        yield Rule(re.compile(rf"{numeral}\s?%"), self._percent)
        yield Rule(re.compile(r"(\d{4})(?=年)"), lambda match: self.numbers.digits(match[1]))
        yield Rule(re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})(?!\d)"), self._date)
        yield Rule(re.compile(r"(\d{1,2}):(\d{2})(?![\d:])"), self._time)
        yield Rule(re.compile(numeral), self._number)
        yield Rule(re.compile(rf"-{numeral}"), self._negative)

    def word_rules(self) -> Iterator[Rule]:
        """The rules of letters: money such as R$ 5, and words that are written short."""
        yield from self._money_rules()
        yield Rule(re.compile(self._currency), lambda match: self.signs[match[0]])
        for short, words in self.abbreviations.items():
            pattern = re.compile(rf"{re.escape(short)}(?!\w)")
            yield Rule(pattern, lambda _, words=words: words)  # type: ignore[misc]

    def _money_rules(self) -> Iterator[Rule]:
        yield Rule(re.compile(rf"{self._currency}\s?{self._numeral}"), self._money)

    @property
    def _numeral(self) -> str:
        groups, mark = (r"[. ]\d{3}", ",") if self.numbers.decimal == "," else (r",\d{2,3}", r"\.")
        whole = rf"(?P<whole>\d{{1,3}}(?:{groups})+(?!\d)|\d{{1,40}})"
        return rf"{whole}(?:{mark}(?P<fraction>\d{{1,40}}))?"

    @property
    def _currency(self) -> str:
        signs = (sign for sign in self.signs if unicodedata.category(sign[-1]) == "Sc")
        return f"(?P<sign>{alternatives(signs)})"

    def _number(self, match: re.Match[str], *, keeps_zeros: bool = True) -> str:
        fraction = match["fraction"] or ""
        if not keeps_zeros and len(fraction) == 2 and not int(fraction):
            fraction = ""
        return self.numbers.number(re.sub(r"\D", "", match["whole"]), fraction)

    def _money(self, match: re.Match[str]) -> str:
        return f"{self._number(match, keeps_zeros=False)} {self.signs[match['sign']]}"

    def _percent(self, match: re.Match[str]) -> str:
        number, sign = self._number(match), self.signs["%"]
        return sign.format(number) if "{" in sign else f"{number} {sign}"

    def _date(self, match: re.Match[str]) -> str:
        return " ".join(self.numbers.cardinal(int(part)) for part in match.groups())

    def _time(self, match: re.Match[str]) -> str:
        hour, minute = self.numbers.cardinal(int(match[1])), int(match[2])
        return f"{hour} {self.numbers.cardinal(minute)}" if minute else hour

    def _negative(self, match: re.Match[str]) -> str | None:
        before = match.string[max(0, match.start() - 1) : match.start()]
        if before.isalnum():
            return None
        return f"{self.numbers.minus} {self._number(match)}"


@lru_cache
def tongue(reading: Reading) -> Tongue:
    """The tables of a language that is not English."""
    data = files(__package__).joinpath("languages", f"{reading}.toml").read_bytes()
    return convert(msgspec.toml.decode(data), Tongue)
