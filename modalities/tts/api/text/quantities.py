"""Numbers with and without what they count: money, units, ranges, fractions, powers, ordinals.

Owns how quantities are read. Knows nothing of dates and of digits that are names.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.numbers import digits, plural
from triptych.modalities.tts.api.text.rules import (
    NUM,
    WORD_END,
    ReadingRules,
    Rule,
    RuleSet,
    is_attached,
    is_singular,
    word_after,
    word_before,
)

_DASH = r"(?:-| ?– ?)"
_POWERS = {"2": "square", "3": "cubic"}
_LENGTHS = frozenset(("m", "km", "cm", "mm", "dm", "nm", "μm", "ft", "in", "mi", "yd"))
_OPERATION = re.compile(r" ?[-+=*/<>]")
_CODE_LETTERS = frozenset("BCFMkx")
_RAISED = {"2": "squared", "3": "cubed"}
_STATE = re.compile(r"[A-Z]{2}\Z")  # before a postal code
_OUT_OF = (10, 100)


def quantity_rules(voice: ReadingRules) -> RuleSet:
    """The rules for numbers, most specific first."""
    quantities = _Quantities(voice)
    measured = [
        Rule(_feet_and_inches(), quantities.feet),
        Rule(_arc(), quantities.arc),
        Rule(_money(voice), quantities.money),
        Rule(_measure(voice), quantities.measure),
    ]
    counted = [
        Rule(
            re.compile(rf"(\d{{1,3}}(?:,\d{{3}}){{0,12}}|\d{{1,15}})(?i:st|nd|rd|th){WORD_END}"),
            quantities.ordinal,
        ),
        Rule(re.compile(rf"(\d{{2}}|\d{{4}})'?s{WORD_END}"), quantities.decade),
        *measured,
        Rule(re.compile(rf"({NUM})((?: ?[x×] ?{NUM}){{1,3}}){WORD_END}"), quantities.by),
        Rule(
            re.compile(r"(?:(?<!/)(\d{1,6}) )?(\d{1,4})/(\d{1,4})(?![\w/]|[.,]\d)"),
            quantities.fraction,
        ),
        Rule(re.compile(rf"(?<!\d-)({NUM}){_DASH}({NUM})(?![\w%-]|\.\d)"), quantities.range),
        Rule(re.compile(NUM), quantities.plain),
        Rule(re.compile(r"\d{1,40}"), lambda match: digits(match[0])),
    ]
    signs = alternatives(voice.language.signs)
    signed = [
        Rule(re.compile(rf"'(\d0)s{WORD_END}"), quantities.decade),
        Rule(re.compile(rf"'(\d\d){WORD_END}"), quantities.short_year),
        *measured[-2:],
        Rule(re.compile(rf"(?<![\w)])({signs}) ?(?=[.\d]|{_symbols(voice)})"), quantities.sign),
        Rule(re.compile(r"\.(\d{1,40})"), lambda match: f"point {digits(match[1])}"),
        Rule(re.compile(r"(?<=[\w)])\^(-?)(\w{1,12})"), quantities.power),
    ]
    codes = [Rule(_code_money(voice), quantities.money)]
    return RuleSet(digit=counted, letter=codes, sign=signed)


def _symbols(voice: ReadingRules) -> str:
    return alternatives(sign for sign in voice.language.currencies if not sign.isalpha())


def _magnitude(voice: ReadingRules) -> str:
    words = alternatives(word for word in voice.language.magnitudes if len(word) > 3)
    letters = alternatives(word for word in voice.language.magnitudes if len(word) <= 3)
    return rf"(?:(?:[ -]?(?P<large>{words})|(?P<short>{letters})){WORD_END})?"


def _per(voice: ReadingRules) -> str:
    names = alternatives({**voice.language.units, **voice.language.per})
    return rf"(?:/(?P<per>{names}){WORD_END}(?!/))?"


def _range(repeated: str = "") -> str:
    """One numeral or two; the second may repeat what stood before the first ("$5-$10")."""
    return rf"(?P<low>{NUM}|\.\d{{2}}(?!\d))(?:{_DASH}(?:{repeated})?(?P<high>{NUM}))?"


def _money(voice: ReadingRules) -> re.Pattern[str]:
    sign, codes = _symbols(voice), alternatives(filter(str.isalpha, voice.language.currencies))
    amount = _range(sign) + _magnitude(voice)
    return re.compile(
        rf"(?:(?<![\w)])(?P<minus>-))?(?:(?P<before>{sign}) ?{amount}"
        rf"|{_renamed(amount)} ?(?P<after>{codes}{WORD_END}|{sign}(?!\d))){_per(voice)}(?!\d)"
    )


def _code_money(voice: ReadingRules) -> re.Pattern[str]:
    codes = alternatives(code for code in voice.language.currencies if code[0].isalpha())
    return re.compile(rf"(?<!\w)(?P<before>{codes}) ?{_range(codes)}{_magnitude(voice)}(?!\d)")


def _renamed(pattern: str) -> str:
    """The same groups a second time: names with a final underscore."""
    return re.sub(r"\(\?P<(\w+)>", r"(?P<\1_>", pattern)


def _measure(voice: ReadingRules) -> re.Pattern[str]:
    lang = voice.language
    tight, loose = alternatives({**lang.tight_units, **lang.units}), alternatives(lang.units)
    return re.compile(
        rf"(?:(?<![\w)])(?P<minus>-))?{_range()}"
        rf"(?:(?P<large> ?(?:hundred|thousand|million|billion|trillion)){WORD_END})?"
        rf"(?P<hyphen>-)?(?:(?P<tight>{tight})| (?P<loose>{loose}))"
        rf"(?P<power>\^?[23](?![\d.]\d|\d))?(?![\w]){_per(voice)}(?:\.(?= ?[a-z\d]))?"
    )


def _feet_and_inches() -> re.Pattern[str]:
    return re.compile(r"(\d{1,2})['′] ?(\d{1,2}(?:\.\d)?)(?:[\"″]|'')?(?![\w'\"])")


def _arc() -> re.Pattern[str]:
    return re.compile(r"(\d{1,3})° ?(\d{1,2})['′] ?(?:(\d{1,2}(?:\.\d{1,3})?)(?:[\"″]|''))?")


class _Quantities:
    def __init__(self, voice: ReadingRules) -> None:
        self._lang = voice.language
        self._say = voice.numbers

    def _numbers(self, low: str, high: str | None) -> str:
        words = self._say.number(low)
        return f"{words} to {self._say.number(high)}" if high else words

    def money(self, match: re.Match[str]) -> str | None:
        found = {name.rstrip("_"): text for name, text in match.groupdict().items() if text}
        symbol = found.get("before") or found.get("after", "")
        low, high = found["low"], found.get("high")
        scale = found.get("large") or self._lang.magnitudes.get(found.get("short", ""))
        minus = "minus " if "minus" in found else ""
        one, many, cent, cents = self._lang.currencies[symbol]
        if not (scale or high) and re.fullmatch(r"[\d,]*\.\d\d", low) and cent:
            words = self._coins(low, one, many, (cent, cents))
        else:
            amount = self._numbers(low, high) + (f" {scale}" if scale else "")
            words = f"{amount} {one if is_singular(low) and not (scale or high) else many}"
        return minus + words + self._per(found.get("per"))

    def _coins(self, numeral: str, one: str, many: str, hundredths: tuple[str, str]) -> str:
        whole, _, rest = numeral.partition(".")
        major = f"{self._say.number(whole or '0')} {one if is_singular(whole) else many}"
        if not int(rest):
            return major
        minor = f"{self._say.cardinal(int(rest))} {hundredths[int(rest) != 1]}"
        return minor if not whole.strip("0,") else f"{major} and {minor}"

    def _per(self, unit: str | None) -> str:
        if not unit:
            return ""
        return f" per {self._lang.per.get(unit) or self._lang.units[unit][0]}"

    def measure(self, match: re.Match[str]) -> str | None:
        low, high, large = match["low"], match["high"], match["large"]
        unit = match["tight"] or match["loose"]
        if unit in ('"', "'") and self._closes_quote(match, unit):
            return None
        if unit in _CODE_LETTERS and is_attached(match):
            return None  # "B2B"
        if unit in ("C", "F") and len(low) < 2:
            return None  # "Figure 5C"
        if unit == "x" and _OPERATION.match(match.string, match.end(), match.endpos):
            return None  # "2x + 1"
        if match["power"] and unit not in _LENGTHS:
            return None
        one, many = self._lang.units.get(unit) or self._lang.tight_units[unit]
        single = bool(match["hyphen"]) or (is_singular(low) and not high and not large)
        name = one if single else many
        if match["power"]:
            name = f"{_POWERS[match['power'][-1]]} {name}"
        amount = self._numbers(low, high) + (f" {large.strip()}" if large else "")
        return ("minus " if match["minus"] else "") + f"{amount} {name}{self._per(match['per'])}"

    def _closes_quote(self, match: re.Match[str], mark: str) -> bool:
        """Whether the mark after a number is more likely a quotation's end than inches."""
        before = match.string[max(0, match.start() - 200) : match.start()]
        return before.count(mark) % 2 == 1 or mark == "'"

    def feet(self, match: re.Match[str]) -> str | None:
        feet, inches = match[1], match[2]
        if is_attached(match) or float(inches) >= 12:
            return None  # "Q4'23"
        return (
            f"{self._say.number(feet)} {'foot' if is_singular(feet) else 'feet'} "
            f"{self._say.number(inches)} {'inch' if is_singular(inches) else 'inches'}"
        )

    def arc(self, match: re.Match[str]) -> str:
        units = (("degree", "degrees"), ("minute", "minutes"), ("second", "seconds"))
        return " ".join(
            f"{self._say.number(part)} {one if is_singular(part) else many}"
            for part, (one, many) in zip(match.groups(), units, strict=True)
            if part
        )

    def ordinal(self, match: re.Match[str]) -> str:
        return self._say.ordinal(int(match[1].replace(",", "")))

    def decade(self, match: re.Match[str]) -> str:
        n = int(match[1])
        return plural(self._say.year(n) if n >= 1000 else self._say.cardinal(n))

    def short_year(self, match: re.Match[str]) -> str:
        return self._short(int(match[1]))

    def _short(self, n: int) -> str:
        return self._say.cardinal(n) if n >= 10 else f"oh {self._say.cardinal(n)}"

    def by(self, match: re.Match[str]) -> str:
        numerals = re.split(r" ?[x×] ?", match[0])
        joiner = " times " if " × " in match[0] else " by "
        return joiner.join(map(self._say.number, numerals))

    def fraction(self, match: re.Match[str]) -> str | None:
        whole, top, bottom = match.groups()
        a, b = int(top), int(bottom)
        if is_attached(match) or not b or (whole and a >= b):
            return None
        words = self._ratio(a, b)
        if not whole:
            return words
        if words.startswith("one "):
            words = words.removeprefix("one ")
            words = f"{'an' if words[0] == 'e' else 'a'} {words}"
        return f"{self._say.number(whole)} and {words}"

    def _ratio(self, a: int, b: int) -> str:
        top = self._say.cardinal(a)
        if b in _OUT_OF and a > 1:
            return f"{top} out of {self._say.cardinal(b)}"
        if b == 1 or a >= 100 or b > 100:
            return f"{top} over {self._say.cardinal(b)}"
        names = {2: ("half", "halves"), 4: ("quarter", "quarters")}
        one, many = names.get(b) or (self._say.ordinal(b), f"{self._say.ordinal(b)}s")
        return f"{top} {one if a == 1 else many}"

    def range(self, match: re.Match[str]) -> str | None:
        low, high = match[1], match[2]
        if is_attached(match):
            return None
        if self._is_year(low) and re.fullmatch(r"\d{2}|\d{4}", high):
            end = self._say.year(int(high)) if len(high) == 4 else self._short(int(high))
            return f"{self._say.year(int(low))} to {end}"
        return self._numbers(low, high)

    def _is_year(self, numeral: str) -> bool:
        return re.fullmatch(r"1\d{3}|20\d{2}", numeral) is not None

    def plain(self, match: re.Match[str]) -> str:
        numeral = match[0]
        if is_attached(match) and numeral.isdecimal():
            return self._say.code(numeral)
        if len(numeral) == 5 and numeral.isdecimal() and _STATE.match(word_before(match)):
            return digits(numeral)
        if self._is_year(numeral) and not self._counts(match):
            return self._say.year(int(numeral))
        return self._say.number(numeral)

    def _counts(self, match: re.Match[str]) -> bool:
        """Whether four digits count the plural that follows, rather than name a year."""
        if word_before(match).lower() in self._lang.words.year_cues:
            return False
        after = word_after(match)
        if after in ("people", "men", "women", "children"):
            return True
        return len(after) > 3 and after.islower() and self._is_plural(after)

    def _is_plural(self, word: str) -> bool:
        return (
            word.endswith("s")
            and not word.endswith(("ss", "us", "is"))
            and word not in self._lang.words.not_counted
        )

    def sign(self, match: re.Match[str]) -> str:
        return self._lang.signs[match[1]]

    def power(self, match: re.Match[str]) -> str | None:
        minus, exponent = match[1], match[2]
        if not minus and exponent in _RAISED:
            return _RAISED[exponent]
        name = self._say.number(exponent) if exponent.isdecimal() else exponent
        if not name.isalpha() and not exponent.isdecimal():
            return None
        return f"to the power of {'minus ' if minus else ''}{name}"
