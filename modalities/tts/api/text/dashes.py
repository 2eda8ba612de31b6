"""Decides whether a hyphen or dash between two values means "to" or "minus".

Owns that decision, for the whole text and before any rule reads it, so that the rules need no
context. A dash between two values of one kind (times, money, dates, measures, counts) becomes
`RANGE`; one in a calculation becomes `MINUS`; any other is unchanged. Knows nothing of how values
are read.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.modalities.tts.api.text.language import Language, alternatives

MINUS, RANGE = "−", "‒"
"""Signs that do not otherwise occur in cleaned text."""

_WINDOW = 80  # context on either side, in characters
_DASH = re.compile(r"(?<=[\w.)%°$£€¢'\"′″])( ?)[-–]\1(?=[\w(.$£€¥₩₹₽₿₺₪₫₱₴+-])|(?<=\S) [-–] (?=\S)")
_SERIAL = re.compile(
    r"(?<![\w-])(?:\d{4}-\d\d?-\d\d?|(?:\d{1,3}-)?\d{3}-\d{2,3}-\d{4}|\d{3}-\d{4}|\d{4}(?:-\d{4}){3})(?![\w-])"
)
_RUN_BEFORE = re.compile(r"(?:\S| (?=[-–+*/=×÷^] )|(?<= [-–+*/=×÷^]) )*\Z")
_RUN_AFTER = re.compile(r"(?:\S| (?=[-–+*/=×÷^] )|(?<= [-–+*/=×÷^]) )*")
_OPERATION = re.compile(
    r"[\w)%°] ?[=+*×÷^] ?[-(]?(?:[$£€]?\.?\d|[A-Za-z](?!\w)|[(?])"
    r"|[\d)] ?/ ?[\d(]"
)
_FRACTION = re.compile(r"\d{1,4}(?:/\d{1,4}){1,2}\Z")
_ASKED = re.compile(
    r"(?i)\b(?:what(?:'s| is| are)|how much is|calculate|compute|evaluate|solve|work out) \Z"
)
_RESULT = re.compile(r" (?:equals|leaves)\b")
_VARIABLE_BEFORE = re.compile(r"(?:(?<![\w'])[A-Za-z]|\))\Z")
_VARIABLE_AFTER = re.compile(r"[A-Za-z](?![\w'-])|\(")
_SMALL_VARIABLE = re.compile(r"(?<![\w'.-])[a-z]\Z")
_WHOLE_NUMBER = re.compile(r"\d{1,15}(?![\w-]|\.\d)")
_CHAINED_BEFORE = re.compile(r"\d [-–] [^\s]{1,40}\Z")
_CHAINED_AFTER = re.compile(r"[^\s]{1,40} [-–] \d")


@dataclass(frozen=True, slots=True)
class _Value:
    """A value directly before or after a dash."""

    kind: str
    numeral: str

    @property
    def size(self) -> float:
        return float(self.numeral.replace(",", "") or 0)


class Dashes:
    """Classifies every dash of a text. Stateless, thread-safe."""

    def __init__(self, language: Language) -> None:
        words = language.words
        months = alternatives({*words.months, *(name[:3] for name in words.months), "Sept"})
        days = alternatives(name[:n] for name in words.weekdays for n in (3, 4, 5, 12))
        units = alternatives({**language.units, **language.tight_units})
        per = alternatives({**language.units, **language.per})
        symbols = alternatives(name for name in language.currencies if not name.isalpha())
        codes = alternatives(filter(str.isalpha, language.currencies))
        large = alternatives(word for word in language.magnitudes if len(word) > 3)
        short = alternatives(word for word in language.magnitudes if len(word) <= 3)
        half = r"(?: ?[AaPp](?:\.[Mm]\.?|[Mm])(?!\w))"
        zone = rf"(?: {alternatives(words.timezones)}(?!\w))?"
        whole = r"(?:\d{1,3}(?:,\d{2,3}){1,12}|\d{1,40})"
        num = rf"{whole}(?:\.\d{{1,40}})?(?:[eE][+-]?\d{{1,3}})?|\.\d{{1,40}}"
        scale = rf"(?: ?{large}(?!\w)|{short}(?!\w))?"
        value = (
            rf"(?P<date>\d{{1,4}}([-/.])\d{{1,2}}\2\d{{1,4}}(?:[T ]\d{{1,2}}:\d\d)?"
            rf"|{months}\.? \d{{1,2}}(?:st|nd|rd|th)?"
            rf"(?:,? \d{{4}})?|\d{{1,2}}(?:st|nd|rd|th)? {months}(?:\.|,? \d{{4}})?)(?!\w)"
            rf"|(?P<time>\d{{1,2}}:\d\d(?::\d\d)?{half}?{zone}|\d{{1,2}}{half}{zone})(?!\w)"
            rf"|(?P<fraction>\d{{1,4}}/\d{{1,4}})(?![\w/])"
            rf"|(?P<money>{symbols} ?(?:{num}){scale}|{codes} (?:{num}){scale}"
            rf"|(?:{num}){scale} ?(?:{symbols}|{codes}(?!\w)))(?:/{per}(?!\w))?"
            rf"|(?P<measure>(?:{num})(?: ?{large})? ?{units}(?:\^?[23])?(?![\w])(?:/{per}(?!\w))?)"
            rf"|(?P<count>(?:{num}){scale})(?![\w]|\.\d)"
            rf"|(?P<name>(?:{months}|{days})\.?)(?!\w)"
        )
        self._after = re.compile(rf"[-+]?(?:{value})")
        self._before = re.compile(rf"(?<![\w.,/:])(?:{value})\Z")
        self._numeral = re.compile(num)

    def __call__(self, text: str) -> str:
        """`text` with its dashes replaced; its length is unchanged."""
        pieces, done = [], 0
        serials = [match.span() for match in _SERIAL.finditer(text)]
        at_serial = 0
        for match in _DASH.finditer(text):
            at = match.start() + match[0].startswith(" ")
            while at_serial < len(serials) and serials[at_serial][1] <= at:
                at_serial += 1
            if at_serial < len(serials) and serials[at_serial][0] < at:
                continue
            if sign := self._decide(text, at, is_spaced=match[0].startswith(" ")):
                pieces += [text[done:at], sign]
                done = at + 1
        return "".join([*pieces, text[done:]])

    def _decide(self, text: str, at: int, *, is_spaced: bool) -> str | None:
        before = text[max(0, at - _WINDOW) : at].rstrip(" ")
        after = text[at + 1 : at + 1 + _WINDOW].lstrip(" ")
        left, right = self._read(self._before.search(before)), self._read(self._after.match(after))
        is_left = left is not None or _VARIABLE_BEFORE.search(before)
        is_right = right is not None or _VARIABLE_AFTER.match(after)
        if not is_left or not is_right:
            return None
        if _is_calculation(before, after):
            return MINUS
        if left is None:
            is_variable = _SMALL_VARIABLE.search(before) and _WHOLE_NUMBER.match(after)
            return MINUS if is_variable and not is_spaced else None
        if right is None:
            return None
        return RANGE if _is_range(left, right, before, after, is_spaced=is_spaced) else None

    def _read(self, match: re.Match[str] | None) -> _Value | None:
        if match is None or match.lastgroup is None:
            return None
        kind = next(name for name, text in match.groupdict().items() if text is not None)
        numeral = self._numeral.search(match[0])
        return _Value(kind, numeral[0] if numeral else "")


def _is_calculation(before: str, after: str) -> bool:
    """Whether a dash in this context is part of a formula or of a calculation to work out."""
    head, tail = _RUN_BEFORE.search(before), _RUN_AFTER.match(after)
    assert head is not None
    assert tail is not None
    if _ASKED.search(before[: head.start()]) or _RESULT.match(after[tail.end() :]):
        return True
    if _FRACTION.match(head[0]) and _FRACTION.match(tail[0].rstrip(".,;:!?")):
        return False
    return any(map(_OPERATION.search, (head[0], tail[0])))


def _is_range(left: _Value, right: _Value, before: str, after: str, *, is_spaced: bool) -> bool:
    kinds = {left.kind, right.kind}
    if kinds == {"count"}:
        is_chained = _CHAINED_BEFORE.search(before) or _CHAINED_AFTER.match(after)
        return is_spaced and left.size < right.size and not is_chained
    if "name" in kinds:
        return is_spaced and kinds == {"name"}
    if left.kind == "count" and right.kind == "measure" and not is_spaced:
        return False  # "5-10 kg" is one quantity for the rules, "16-bit" a name
    return left.kind == right.kind or "count" in kinds
