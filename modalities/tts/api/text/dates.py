"""Dates, clock times and durations.

Owns how a moment or a stretch of time is read. A numeral that cannot be a date or a time (month
13, minute 70) is left to the rules for numbers.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.rules import (
    WORD_END,
    ReadingRules,
    Rule,
    RuleSet,
    ended,
    is_sentence_end,
    word_before,
)

_MERIDIEM = r"(?: ?(?P<half>[AaPp])(?:\.[Mm]\.?|[Mm])(?![\w]))"
_DASH = r"(?:-| ?– ?)"
_DAYS = rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?:{_DASH}(?P<last>\d{{1,2}})(?:st|nd|rd|th)?)?"
_CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.\d{1,9})?)?"
_YEAR = r"(?:,? (?P<year>\d{4})(?![\w,]\d|[\w%])|(?P<noyear>))"
_MIN_YEAR_DIGITS = 4


def date_rules(voice: ReadingRules) -> RuleSet:
    """The rules for dates and times."""
    dates = _Dates(voice)
    return RuleSet(
        digit=(*_numeric_dates(voice, dates), *_times(voice, dates)),
        letter=_named_dates(voice, dates),
        sign=(_until(voice),),
    )


def _numeric_dates(voice: ReadingRules, dates: _Dates) -> tuple[Rule, ...]:
    """Dates that begin with digits."""
    day_first = rf"(?:(?<=the )|(?P<the>[Tt]he )?){_DAYS}"
    month = rf"(?P<month>{_month_names(voice)})"
    return (
        Rule(
            re.compile(rf"(\d{{4}})([-/.])(\d\d?)\2(\d\d?)(?!\d|-\d)(?:[T ](?={_CLOCK}))?"),
            dates.iso,
        ),
        Rule(re.compile(r"(\d{4})-(0\d)(?![\w-])"), dates.year_month),
        Rule(
            re.compile(r"(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|\d{2})(?![\w/]|[.-]\d)"),
            dates.numeric,
        ),
        Rule(re.compile(rf"{day_first} (?:of )?{month}\.?{_YEAR}{WORD_END}"), dates.day_month),
    )


def _times(voice: ReadingRules, dates: _Dates) -> tuple[Rule, ...]:
    """Clock times and durations, which all begin with digits."""
    zone = rf"(?P<zone>Z| ?{alternatives(voice.language.words.timezones)}{WORD_END})?"
    length = rf"(?:(\d{{1,3}})h ?)?(\d{{1,3}})(?:m|min) ?(?:(\d{{1,3}})s)?{WORD_END}"
    hours = rf"(?P<from>\d{{1,2}}){_DASH}(?P<hour>\d{{1,2}}){_MERIDIEM}"
    return (
        Rule(re.compile(rf"{_CLOCK}{_MERIDIEM}?{zone}h?(?![\w:])"), dates.clock),
        Rule(re.compile(hours), dates.hours),
        Rule(re.compile(rf"(?P<hour>\d{{1,2}}){_MERIDIEM}"), dates.hour),
        Rule(re.compile(r"(\d{1,5}):(\d{1,5})(?![\w:])"), dates.ratio),
        Rule(re.compile(length), dates.duration),
        Rule(re.compile(rf"(\d{{1,3}})h(\d\d)(){WORD_END}"), dates.duration),
    )


def _named_dates(voice: ReadingRules, dates: _Dates) -> tuple[Rule, ...]:
    """Dates that begin with a month or weekday, short or in full."""
    months, weekdays = _month_names(voice), _weekday_names(voice)
    month = rf"(?<!\w)(?P<month>{months})\.?"
    short = alternatives({*(name[:3] for name in voice.language.words.months), "Sept"} - {"May"})
    before_date = rf"(?=,? (?:{months}|\d)|[-–]{weekdays}{WORD_END})"
    return (
        Rule(re.compile(rf"{month} {_DAYS}{_YEAR}(?![\w:%]|[.,]\d)"), dates.month_day),
        Rule(re.compile(rf"{month} (?P<year>\d{{4}})(?![\w%]|,\d)"), dates.month_year),
        Rule(re.compile(rf"(?<!\w)({weekdays})\.?{before_date}"), dates.weekday),
        Rule(re.compile(rf"(?<!\w)({weekdays})\.(?!\w)"), dates.weekday),
        Rule(re.compile(rf"(?<=[a-z][-–])({weekdays}){WORD_END}"), dates.weekday),
        Rule(re.compile(rf"(?<!\w)({short})\.(?!\w)"), dates.month),
    )


def _until(voice: ReadingRules) -> Rule:
    """The dash between two times or days."""
    names = f"(?:{_weekday_names(voice)}|{_month_names(voice)})"
    return Rule(
        re.compile(
            r"(?:(?<=[\dMm.])|(?<=[\dMm.] ))– ?(?=\d)"
            r"|(?:(?<=[ap]m)|(?<=[ap]m )|(?<=[ap]\.m\.)|(?<=:\d\d))- ?(?=\d)"
            rf"|(?<=[a-z.])[-–](?={names}{WORD_END})"
        ),
        lambda match: "to",
    )


def _weekday_names(voice: ReadingRules) -> str:
    return alternatives(name[:n] for name in voice.language.words.weekdays for n in (3, 4, 5))


def _month_names(voice: ReadingRules) -> str:
    full = voice.language.words.months
    return alternatives({*full, *(name[:3] for name in full), "Sept"})


class _Dates:
    def __init__(self, voice: ReadingRules) -> None:
        self._say = voice.numbers
        self._order = voice.order
        self._months = voice.language.words.months
        self._weekdays = voice.language.words.weekdays
        self._clock_cues = voice.language.words.clock_cues

    def _month(self, name: str) -> str:
        return next(month for month in self._months if month.startswith(name[:3]))

    def _date(self, year: str | None, month: int, day: int) -> str | None:
        if not (1 <= month <= 12 and 1 <= day <= 31):
            return None
        name, ordinal = self._months[month - 1], self._say.ordinal(day)
        words = f"{name} {ordinal}" if self._order == "mdy" else f"the {ordinal} of {name}"
        return f"{words}, {self._say.year(int(year))}" if year else words

    def iso(self, match: re.Match[str]) -> str | None:
        words = self._date(match[1], int(match[3]), int(match[4]))
        return f"{words}," if words and match.group().endswith(("T", " ")) else words

    def year_month(self, match: re.Match[str]) -> str | None:
        month = int(match[2])
        return f"{self._months[month - 1]} {self._say.year(int(match[1]))}" if month else None

    def numeric(self, match: re.Match[str]) -> str | None:
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

    def day_month(self, match: re.Match[str]) -> str | None:
        days = self._days(match)
        if days is None:
            return None
        article = "" if match.string[: match.start()].endswith(("the ", "The ")) else "the "
        return ended(
            self._with_year(f"{article}{days} of {self._month(match['month'])}", match), match
        )

    def month_day(self, match: re.Match[str]) -> str | None:
        days = self._days(match)
        return self._with_year(f"{self._month(match['month'])} {days}", match) if days else None

    def month_year(self, match: re.Match[str]) -> str:
        return f"{self._month(match['month'])} {self._say.year(int(match['year']))}"

    def month(self, match: re.Match[str]) -> str:
        return ended(self._month(match[1]), match)

    def weekday(self, match: re.Match[str]) -> str | None:
        if match[0] == "Sun." and is_sentence_end(match):
            return None
        return ended(next(day for day in self._weekdays if day.startswith(match[1])), match)

    def clock(self, match: re.Match[str]) -> str | None:
        hour, minute, second = int(match["hour"]), int(match["minute"]), match["second"]
        half, zone = match["half"], (match["zone"] or "").strip()
        if hour > 24 or minute > 59 or int(second or 0) > 59 or (half and not 1 <= hour <= 12):
            return None
        if second and not (half or zone or self._is_clock(match)):
            return self._length(hour, minute, int(second))
        words = self._time(hour, minute, is_bare=not (half or second or zone))
        if second:
            words += f" and {self._count(int(second), 'second')}"
        return ended(words + _halves(half) + (f" {' '.join(zone)}" if zone else ""), match)

    def _is_clock(self, match: re.Match[str]) -> bool:
        text, start = match.string, match.start()
        return (
            word_before(match).lower() in self._clock_cues
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

    def hours(self, match: re.Match[str]) -> str | None:
        first, last = int(match["from"]), int(match["hour"])
        if not (1 <= first <= 12 and 1 <= last <= 12):
            return None
        both = f"{self._say.cardinal(first)} to {self._say.cardinal(last)}"
        return ended(both + _halves(match["half"]), match)

    def hour(self, match: re.Match[str]) -> str | None:
        hour = int(match["hour"])
        if not 1 <= hour <= 12:
            return None
        return ended(self._say.cardinal(hour) + _halves(match["half"]), match)

    def ratio(self, match: re.Match[str]) -> str:
        return f"{self._say.number(match[1])} to {self._say.number(match[2])}"

    def duration(self, match: re.Match[str]) -> str | None:
        hours, minutes, seconds = match.groups()
        if not (hours or seconds):
            return None
        return self._length(int(hours or 0), int(minutes), int(seconds or 0))


def _halves(half: str | None) -> str:
    return f" {half.upper()} M" if half else ""
