"""The spoken forms of written words and signs in English, as read from `english.toml`.

Owns the names and types of the tables, their check when the file is first used, and the regular
expression for any of a list of words. No other language has tables. Knows none of the rules of text
normalization that use them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files

import msgspec

from triptych.core.process.once import once
from triptych.core.process.typed import convert


class WordLists(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plain word lists; english.toml documents each."""

    months: tuple[str, ...]
    weekdays: tuple[str, ...]
    timezones: frozenset[str]
    said: frozenset[str]
    spelled: frozenset[str]
    emphasis: frozenset[str]
    roman_cues: frozenset[str]
    regnal: frozenset[str]
    year_cues: frozenset[str]
    not_counted: frozenset[str]
    clock_cues: frozenset[str]
    phone_cues: frozenset[str]
    starters: frozenset[str]
    tlds: tuple[str, ...]
    extensions: tuple[str, ...]


class Language(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The spoken forms of written words and signs."""

    phrases: dict[str, str]
    titles: dict[str, str]
    inner: dict[str, str]
    numbered: dict[str, str]
    final: dict[str, str]
    streets: dict[str, str]
    units: dict[str, tuple[str, str]]
    tight_units: dict[str, tuple[str, str]]
    per: dict[str, str]
    currencies: dict[str, tuple[str, str, str, str]]
    magnitudes: dict[str, str]
    symbols: dict[str, str]
    signs: dict[str, str]
    operators: dict[str, str]
    address_signs: dict[str, str]
    greek: dict[str, str]
    words: WordLists


@once
def english() -> Language:
    """The English tables."""
    data = files(__package__).joinpath("english.toml").read_bytes()
    return convert(msgspec.toml.decode(data), Language)


def alternatives(words: Iterable[str]) -> str:
    """A regular expression for any of `words`, the longest first."""
    return "(?:" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + ")"
