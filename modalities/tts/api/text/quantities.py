"""Rules for numbers with and without units: money, ranges, fractions, powers, ordinals.

Owns how quantities are read. Knows nothing of dates and of digits that are names.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.numbers import digits, plural
from triptych.modalities.tts.api.text.rules import (
    ReadingStyle,
    RuleGroup,
    is_attached,
    is_singular,
    reads,
    word_after,
    word_before,
)

_POWERS = {"2": "square", "3": "cubic"}
_LENGTHS = frozenset(("m", "km", "cm", "mm", "dm", "nm", "μm", "ft", "in", "mi", "yd"))
_OPERATION = re.compile(r" ?[-+=*/<>]")
_CODE_LETTERS = frozenset("BCFMkx")
_RAISED = {"2": "squared", "3": "cubed"}
_STATE = re.compile(r"[A-Z]{2}\Z")  # before a postal code
_OUT_OF = (10, 100)
_COUNTED = frozenset(
    ["bytes", "bits", "characters", "words", "tokens", "samples", "steps", "days", "weeks"]
)

_MONEY = (
    r"(?:(?<![\w)])(?P<minus>-))?(?:(?P<before>{symbols}) ?{signed_range}{magnitude}"
    r"|{amount_again} ?(?P<after>{code_names}{end}|{symbols}(?!\d))){per}(?!\d)"
)
_MEASURE = (
    r"(?:(?<![\w)])(?P<minus>-))?{range}"
    r"(?:(?P<large> ?(?:hundred|thousand|million|billion|trillion)){end})?"
    r"(?P<hyphen>-)?(?:(?P<tight>{tight})| (?P<loose>{loose}))"
    r"(?P<power>\^?[23](?![\d.]\d|\d))?(?![\w]){per}(?:\.(?= ?[a-z\d]))?"
)


def _amount(repeated: str) -> str:
    """One numeral or two; the second may repeat the sign before the first ("$5-$10")."""
    return (
        rf"(?P<low>{{num}}|\.\d{{2}}(?!\d))"
        rf"(?:{{again}}{{dash}}(?:{repeated})?(?P<high>{{num}}))?"
    )


class QuantityRules(RuleGroup):
    """The rules for numbers, most specific first."""

    def __init__(self, style: ReadingStyle) -> None:
        lang = style.language
        super().__init__(
            style,
            codes=alternatives(code for code in lang.currencies if code[0].isalpha()),
            code_names=alternatives(filter(str.isalpha, lang.currencies)),
            large=alternatives(word for word in lang.magnitudes if len(word) > 3),
            loose=alternatives(lang.units),
            magnitude=r"(?:(?:[ -]?(?P<large>{large})|(?P<short>{short})){end})?",
            power=r"{num}[eE][+-]?\d{1,3}",
            per=rf"(?:/(?P<per>{alternatives({**lang.units, **lang.per})}){{end}}(?!/))?",
            again=r"(?: ?(?P<again>{tight})(?={dash}{num} ?(?P=again)(?!\w)))?",
            range=_amount(""),
            coded_range=_amount("(?P=before) ?").replace("{again}", ""),
            signed_range=_amount("(?P=before) ?").replace("{again}", ""),
            short=alternatives(word for word in lang.magnitudes if len(word) <= 3),
            signs=alternatives(lang.signs),
            symbols=alternatives(sign for sign in lang.currencies if not sign.isalpha()),
            tight=alternatives({**lang.tight_units, **lang.units}),
        )
        self._unit_names = frozenset(many for _, many in lang.units.values()) | _COUNTED
        # The same groups a second time: names with a final underscore.
        again = r"(?: ?(?P<again>{code_names}|{symbols})(?={dash}{num} ?(?P=again)(?!\w)))?"
        ranged = _amount("").replace("{again}", again)
        amount = self.fill(f"{ranged}{{magnitude}}").replace("(?P=again)", "(?P=again_)")
        self._fragments["amount_again"] = re.sub(r"\(\?P<(\w+)>", r"(?P<\1_>", amount)

    @reads(r"(\d{1,3}(?:,\d{3}){0,12}|\d{1,15})(?i:st|nd|rd|th){end}", "digit")
    def _ordinal(self, match: re.Match[str]) -> str:
        return self._say.ordinal(int(match[1].replace(",", "")))

    @reads(r"(\d{2}|\d{4})'?s{end}", "digit")
    @reads(r"'(\d0)s{end}", "sign")
    def _decade(self, match: re.Match[str]) -> str:
        n = int(match[1])
        return plural(self._say.year(n) if n >= 1000 else self._say.cardinal(n))

    @reads(r"(\d{1,2})['′] ?(\d{1,2}(?:\.\d)?)(?:[\"″]|'')?(?![\w'\"])", "digit")
    def _feet(self, match: re.Match[str]) -> str | None:
        feet, inches = match[1], match[2]
        if is_attached(match) or float(inches) >= 12:
            return None  # "Q4'23"
        return (
            f"{self._with_unit(feet, 'foot', 'feet')} {self._with_unit(inches, 'inch', 'inches')}"
        )

    @reads(r"(\d{1,3})° ?(\d{1,2})['′] ?(?:(\d{1,2}(?:\.\d{1,3})?)(?:[\"″]|''))?", "digit")
    def _arc(self, match: re.Match[str]) -> str:
        units = (("degree", "degrees"), ("minute", "minutes"), ("second", "seconds"))
        parts = zip(match.groups(), units, strict=True)
        return " ".join(self._with_unit(part, *names) for part, names in parts if part)

    @reads(r"'(\d\d){end}", "sign")
    def _short_year(self, match: re.Match[str]) -> str:
        return self._short(int(match[1]))

    @reads(_MONEY, "digit", "sign")
    @reads(r"(?<!\w)(?P<before>{codes}) ?{coded_range}{magnitude}(?!\d)", "letter")
    def _money(self, match: re.Match[str]) -> str | None:
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

    @reads(_MEASURE, "digit", "sign")
    def _measure(self, match: re.Match[str]) -> str | None:
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

    @reads(r"{power}(?:{dash}(?P<high>{power}))?{end}", "digit")
    def _scientific(self, match: re.Match[str]) -> str | None:
        is_name = re.fullmatch(r"\d+E\d+", match[0]) is not None  # "Gate 3E5"
        if is_name or is_attached(match) or match.string[: match.start()].endswith("#"):
            return None
        high = match["high"] or ""
        numerals = [match[0].removesuffix(high).rstrip("-–‒ "), high]
        return " to ".join(map(self._power_of_ten, filter(None, numerals)))

    @reads(r"({num})((?: ?[x×] ?{num}){1,3}){end}", "digit")
    def _by(self, match: re.Match[str]) -> str:
        numerals = re.split(r" ?[x×] ?", match[0])
        joiner = " times " if " × " in match[0] else " by "
        return joiner.join(map(self._say.number, numerals))

    @reads(r"(?:(?<!/)(\d{1,6}) )?(\d{1,4})/(\d{1,4})(?![\w/]|[.,]\d)", "digit")
    def _fraction(self, match: re.Match[str]) -> str | None:
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

    @reads(r"(?<!\d-)({num}){dash}({num})(?![\w%-]|\.\d)", "digit")
    def _range(self, match: re.Match[str]) -> str | None:
        low, high = match[1], match[2]
        if is_attached(match):
            return None
        if self._is_year(low) and re.fullmatch(r"\d{2}|\d{4}", high):
            end = self._say.year(int(high)) if len(high) == 4 else self._short(int(high))
            return f"{self._say.year(int(low))} to {end}"
        return self._numbers(low, high)

    @reads("{num}", "digit")
    def _plain(self, match: re.Match[str]) -> str:
        numeral = match[0]
        if is_attached(match) and numeral.isdecimal():
            return self._say.code(numeral)
        if len(numeral) == 5 and numeral.isdecimal() and _STATE.match(word_before(match)):
            return digits(numeral)
        if self._is_year(numeral) and not self._counts(match):
            return self._say.year(int(numeral))
        return self._say.number(numeral)

    @reads(r"\d{1,40}", "digit")
    def _each_digit(self, match: re.Match[str]) -> str:
        return digits(match[0])

    @reads(r"(?<![\w)])({signs}) ?(?=[.\d]|{symbols})", "sign")
    def _sign(self, match: re.Match[str]) -> str:
        return self._lang.signs[match[1]]

    @reads(r"\.(\d{1,40})", "sign")
    def _point(self, match: re.Match[str]) -> str:
        return f"point {digits(match[1])}"

    @reads(r"(?<=[\w)])\^(-?)(\w{1,12})", "sign")
    def _power(self, match: re.Match[str]) -> str | None:
        minus, exponent = match[1], match[2]
        if not minus and exponent in _RAISED:
            return _RAISED[exponent]
        name = self._say.number(exponent) if exponent.isdecimal() else exponent
        if not name.isalpha() and not exponent.isdecimal():
            return None
        return f"to the power of {'minus ' if minus else ''}{name}"

    def _with_unit(self, numeral: str, one: str, many: str) -> str:
        return f"{self._say.number(numeral)} {one if is_singular(numeral) else many}"

    def _power_of_ten(self, numeral: str) -> str:
        """A numeral with an exponent: "1.5e-3"."""
        factor, _, exponent = numeral.lower().partition("e")
        power = self._say.cardinal(int(exponent))  # adds "minus" itself
        return f"{self._say.number(factor)} times ten to the {power}"

    def _numbers(self, low: str, high: str | None) -> str:
        words = self._say.number(low)
        return f"{words} to {self._say.number(high)}" if high else words

    def _coins(self, numeral: str, one: str, many: str, hundredths: tuple[str, str]) -> str:
        whole, _, rest = numeral.partition(".")
        major = self._with_unit(whole or "0", one, many)
        if not int(rest):
            return major
        minor = f"{self._say.cardinal(int(rest))} {hundredths[int(rest) != 1]}"
        return minor if not whole.strip("0,") else f"{major} and {minor}"

    def _per(self, unit: str | None) -> str:
        if not unit:
            return ""
        return f" per {self._lang.per.get(unit) or self._lang.units[unit][0]}"

    def _closes_quote(self, match: re.Match[str], mark: str) -> bool:
        """Whether the mark after a number more likely closes a quotation than means inches."""
        before = match.string[max(0, match.start() - 200) : match.start()]
        return before.count(mark) % 2 == 1 or mark == "'"

    def _short(self, n: int) -> str:
        return self._say.cardinal(n) if n >= 10 else f"oh {self._say.cardinal(n)}"

    def _ratio(self, a: int, b: int) -> str:
        top = self._say.cardinal(a)
        if b in _OUT_OF and a > 1:
            return f"{top} out of {self._say.cardinal(b)}"
        if b == 1 or a >= 100 or b > 100:
            return f"{top} over {self._say.cardinal(b)}"
        names = {2: ("half", "halves"), 4: ("quarter", "quarters")}
        one, many = names.get(b) or (self._say.ordinal(b), f"{self._say.ordinal(b)}s")
        return f"{top} {one if a == 1 else many}"

    def _is_year(self, numeral: str) -> bool:
        return re.fullmatch(r"1\d{3}|20\d{2}", numeral) is not None

    def _counts(self, match: re.Match[str]) -> bool:
        """Whether four digits count the plural that follows, rather than name a year."""
        after = word_after(match)
        if after in self._unit_names:
            return True
        if word_before(match).lower() in self._lang.words.year_cues:
            return False
        if after in ("people", "men", "women", "children"):
            return True
        is_plural = after.endswith("s") and not after.endswith(("ss", "us", "is"))
        is_counted = is_plural and after not in self._lang.words.not_counted
        return len(after) > 3 and after.islower() and is_counted
