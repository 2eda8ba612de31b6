"""Rules for dates, clock times and durations.

Owns how a moment or a duration is read. A numeral that cannot be a date or a time (month 13, minute
70) is left to the rules for numbers.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.rules import (
    ReadingStyle,
    RuleGroup,
    is_sentence_end,
    reads,
    with_full_stop,
    word_before,
)

_FRAGMENTS: Mapping[str, str] = MappingProxyType(
    {
        "clock": r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.\d{1,9})?)?",
        "days": r"(?P<day>\d{1,2})(?:st|nd|rd|th)?(?:{dash}(?P<last>\d{1,2})(?:st|nd|rd|th)?)?",
        "meridiem": r"(?: ?(?P<half>[AaPp])(?:\.[Mm]\.?|[Mm])(?![\w]))",
        "month": r"(?P<month>{months})",
        "year": r"(?:,? (?P<year>\d{4})(?![\w,]\d|[\w%])|(?P<noyear>))",
        "zone": r"(?P<zone>Z| ?{timezones}{end})?",
    }
)
_MIN_YEAR_DIGITS = 4


class DateRules(RuleGroup):
    """The rules for dates and times."""

    def __init__(self, style: ReadingStyle) -> None:
        words = style.language.words
        short = {name[:3] for name in words.months} | {"Sept"}
        super().__init__(
            style,
            months=alternatives({*words.months, *short}),
            short_months=alternatives(short - {"May"}),
            weekdays=alternatives(name[:n] for name in words.weekdays for n in (3, 4, 5)),
            timezones=alternatives(words.timezones),
            **_FRAGMENTS,
        )
        self._order = style.order
        self._months = words.months

    def _month(self, name: str) -> str:
        return next(month for month in self._months if month.startswith(name[:3]))

    def _date(self, year: str | None, month: int, day: int) -> str | None:
        if not (1 <= month <= 12 and 1 <= day <= 31):
            return None
        name, ordinal = self._months[month - 1], self._say.ordinal(day)
        words = f"{name} {ordinal}" if self._order == "mdy" else f"the {ordinal} of {name}"
        return f"{words}, {self._say.year(int(year))}" if year else words

    @reads(r"(\d{4})([-/.])(\d\d?)\2(\d\d?)(?!\d|-\d)(?:[T ](?={clock}))?", "digit")
    def _iso(self, match: re.Match[str]) -> str | None:
        words = self._date(match[1], int(match[3]), int(match[4]))
        return f"{words}," if words and match.group().endswith(("T", " ")) else words

    @reads(r"(\d{4})-(0\d)(?![\w-])", "digit")
    def _year_month(self, match: re.Match[str]) -> str | None:
        month = int(match[2])
        return f"{self._months[month - 1]} {self._say.year(int(match[1]))}" if month else None

    @reads(r"(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|\d{2})(?![\w/]|[.-]\d)", "digit")
    def _numeric(self, match: re.Match[str]) -> str | None:
        first, sign, second, year = int(match[1]), match[2], int(match[3]), match[4]
        if sign != "/" and len(year) < _MIN_YEAR_DIGITS:
            return None
        if len(year) < _MIN_YEAR_DIGITS:
            year = f"{'19' if int(year) > 50 else '20'}{year}"
        day_first = sign == "." or self._order == "dmy"
        month, day = (second, first) if day_first else (first, second)
        return self._date(year, month, day) or self._date(year, day, month)

    def _days(self, match: re.Match[str]) -> str | None:
        days = [int(day) for day in (match["day"], match["last"]) if day]
        if not all(1 <= day <= 31 for day in days):
            return None
        return " to ".join(map(self._say.ordinal, days))

    def _with_year(self, words: str, match: re.Match[str]) -> str:
        return f"{words}, {self._say.year(int(match['year']))}" if match["year"] else words

    @reads(r"(?:(?<=the )|(?P<the>[Tt]he )?){days} (?:of )?{month}\.?{year}{end}", "digit")
    def _day_month(self, match: re.Match[str]) -> str | None:
        days = self._days(match)
        if days is None:
            return None
        article = "" if match.string[: match.start()].endswith(("the ", "The ")) else "the "
        return with_full_stop(
            self._with_year(f"{article}{days} of {self._month(match['month'])}", match), match
        )

    @reads(r"(?<!\w){month}\.? {days}{year}(?![\w:%]|[.,]\d)", "letter")
    def _month_day(self, match: re.Match[str]) -> str | None:
        days = self._days(match)
        return self._with_year(f"{self._month(match['month'])} {days}", match) if days else None

    @reads(r"(?<!\w){month}\.? (?P<year>\d{4})(?![\w%]|,\d)", "letter")
    def _month_year(self, match: re.Match[str]) -> str:
        return f"{self._month(match['month'])} {self._say.year(int(match['year']))}"

    @reads(r"(?<!\w)({weekdays})\.?(?=,? (?:{months}|\d)|[-–]{weekdays}{end})", "letter")
    @reads(r"(?<!\w)({weekdays})\.(?!\w)", "letter")
    @reads(r"(?<=[a-z][-–])({weekdays}){end}", "letter")
    def _weekday(self, match: re.Match[str]) -> str | None:
        if match[0] == "Sun." and is_sentence_end(match):
            return None
        return with_full_stop(
            next(day for day in self._lang.words.weekdays if day.startswith(match[1])), match
        )

    @reads(r"(?<!\w)({short_months})\.(?!\w)", "letter")
    def _short_month(self, match: re.Match[str]) -> str:
        return with_full_stop(self._month(match[1]), match)

    @reads(r"{clock}{meridiem}?{zone}h?(?![\w:])", "digit")
    def _clock(self, match: re.Match[str]) -> str | None:
        hour, minute, second = int(match["hour"]), int(match["minute"]), match["second"]
        half, zone = match["half"], (match["zone"] or "").strip()
        if hour > 24 or minute > 59 or int(second or 0) > 59 or (half and not 1 <= hour <= 12):
            return None
        if second and not (half or zone or self._is_clock(match)):
            return self._length(hour, minute, int(second))
        words = self._time(hour, minute, is_bare=not (half or second or zone))
        if second:
            words += f" and {self._count(int(second), 'second')}"
        return with_full_stop(words + _halves(half) + (f" {' '.join(zone)}" if zone else ""), match)

    def _is_clock(self, match: re.Match[str]) -> bool:
        text, start = match.string, match.start()
        return (
            word_before(match).lower() in self._lang.words.clock_cues
            or text[start - 1 : start] == "T"
            or (text[max(0, start - 11) : start].count("-") == 2)
        )

    def _time(self, hour: int, minute: int, *, is_bare: bool) -> str:
        if (hour, minute) == (0, 0):
            return "midnight" if is_bare else "zero hundred"
        spoken = self._say.cardinal(hour)
        if minute:
            return f"{spoken} {'oh ' if minute < 10 else ''}{self._say.cardinal(minute)}"
        if hour > 12:
            return f"{spoken} hundred"
        return f"{spoken} o'clock" if is_bare else spoken

    def _count(self, n: int, unit: str) -> str:
        return f"{self._say.cardinal(n)} {unit}{'' if n == 1 else 's'}"

    def _length(self, hours: int, minutes: int, seconds: int) -> str:
        parts = [(hours, "hour"), (minutes, "minute"), (seconds, "second")]
        return " ".join(self._count(n, unit) for n, unit in parts if n) or "zero seconds"

    @reads(r"(?P<from>\d{1,2}){dash}(?P<hour>\d{1,2}){meridiem}", "digit")
    def _hours(self, match: re.Match[str]) -> str | None:
        first, last = int(match["from"]), int(match["hour"])
        if not (1 <= first <= 12 and 1 <= last <= 12):
            return None
        both = f"{self._say.cardinal(first)} to {self._say.cardinal(last)}"
        return with_full_stop(both + _halves(match["half"]), match)

    @reads(r"(?P<hour>\d{1,2}){meridiem}", "digit")
    def _hour(self, match: re.Match[str]) -> str | None:
        hour = int(match["hour"])
        if not 1 <= hour <= 12:
            return None
        return with_full_stop(self._say.cardinal(hour) + _halves(match["half"]), match)

    @reads(r"(\d{1,5}):(\d{1,5})(?![\w:])", "digit")
    def _ratio(self, match: re.Match[str]) -> str:
        return f"{self._say.number(match[1])} to {self._say.number(match[2])}"

    @reads(r"(?:(\d{1,3})h ?)?(\d{1,3})(?:m|min) ?(?:(\d{1,3})s)?{end}", "digit")
    @reads(r"(\d{1,3})h(\d\d)(){end}", "digit")
    def _duration(self, match: re.Match[str]) -> str | None:
        hours, minutes, seconds = match.groups()
        if not (hours or seconds):
            return None
        return self._length(int(hours or 0), int(minutes), int(seconds or 0))

    @reads(
        r"(?:(?<=[\dMm.])|(?<=[\dMm.] ))– ?(?=\d)"
        r"|(?:(?<=[ap]m)|(?<=[ap]m )|(?<=[ap]\.m\.)|(?<=:\d\d))- ?(?=\d)"
        r"|(?<=[a-z.])[-–](?=(?:{weekdays}|{months}){end})",
        "sign",
    )
    def _until(self, match: re.Match[str]) -> str:
        """Read the dash between two times or days."""
        return "to"


def _halves(half: str | None) -> str:
    return f" {half.upper()} M" if half else ""
