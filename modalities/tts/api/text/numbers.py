"""English number words: cardinals, ordinals, years, decimals and digit strings.

Owns how a number is read. Knows nothing of money, dates or where the digits stood.
"""

# ruff: noqa: SIM905  # word lists read better as text
from __future__ import annotations

from dataclasses import dataclass

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "_ ten twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = (
    "_ thousand million billion trillion quadrillion quintillion sextillion septillion octillion "
    "nonillion decillion"
).split()
_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_MAX_WORD_DIGITS = 15  # longer numbers are clearer digit by digit


def _below_hundred(n: int) -> str:
    if n < 20:
        return _ONES[n]
    tens, ones = divmod(n, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def digits(text: str) -> str:
    """Each digit by itself: "007" is "zero zero seven". Anything else in `text` is skipped."""
    return " ".join(_ONES[int(char)] for char in text if char.isdecimal())


def plural(words: str) -> str:
    """The plural of a number word: "twenties", "sixes", "two thousands"."""
    if words.endswith("y"):
        return words[:-1] + "ies"
    return words + ("es" if words.endswith("x") else "s")


@dataclass(frozen=True, slots=True)
class NumberWords:
    """Number words of one dialect; with `use_and`, "one hundred and five"."""

    use_and: bool = False

    def cardinal(self, n: int) -> str:
        """A whole number in words, by scales up to decillions."""
        if n < 0:
            return f"minus {self.cardinal(-n)}"
        groups: list[str] = []
        rest, scale = n, 0
        while rest or not groups:
            rest, group = divmod(rest, 1000)
            if group or not (rest or groups):
                joiner = self.use_and and scale == 0 and rest > 0 and group < 100
                words = ("and " if joiner else "") + self._below_thousand(group)
                groups.append(f"{words} {_SCALES[scale]}" if scale else words)
            scale += 1
        return " ".join(reversed(groups))

    def _below_thousand(self, n: int) -> str:
        hundreds, rest = divmod(n, 100)
        if not hundreds:
            return _below_hundred(rest)
        words = f"{_ONES[hundreds]} hundred"
        if not rest:
            return words
        return f"{words} {'and ' if self.use_and else ''}{_below_hundred(rest)}"

    def ordinal(self, n: int) -> str:
        """The position in a sequence: 21 is "twenty-first"."""
        words = self.cardinal(n)
        at = max(words.rfind(" "), words.rfind("-")) + 1
        head, last = words[:at], words[at:]
        if last in _ORDINALS:
            return head + _ORDINALS[last]
        return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")

    def year(self, n: int) -> str:
        """A year as it is read: "nineteen oh five", "two thousand five", "twenty ten"."""
        high, low = divmod(n, 100)
        if not 10 <= high < 100 or (high % 10 == 0 and low < 10):
            return self.cardinal(n)
        return self.pair(high, low)

    def pair(self, high: int, low: int) -> str:
        """Two spoken halves: "seven forty-seven", "five oh five", "nineteen hundred"."""
        if low == 0:
            return f"{_below_hundred(high)} hundred"
        return f"{_below_hundred(high)} {'oh ' if low < 10 else ''}{_below_hundred(low)}"

    def number(self, text: str) -> str:
        """A decimal numeral with optional thousands commas: "1,234.50", ".5", "007"."""
        whole, _, fraction = text.replace(",", "").partition(".")
        if not whole:
            words = ""
        elif len(whole) > _MAX_WORD_DIGITS or (whole[0] == "0" and len(whole) > 1):
            words = digits(whole)
        else:
            words = self.cardinal(int(whole))
        return f"{words} point {digits(fraction)}".strip() if fraction else words

    def code(self, numeral: str) -> str:
        """Digits of a name ("747" of Boeing 747, "19" of COVID-19): pairs, not scales."""
        if numeral[0] == "0" or len(numeral) > 4:
            return digits(numeral)
        n = int(numeral)
        if len(numeral) == 4:
            return self.year(n)
        return self.pair(*divmod(n, 100)) if n >= 100 else _below_hundred(n)
