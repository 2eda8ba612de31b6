"""The interface of rules, and their shared parts: pattern fragments, context, spoken names.

Owns the interface between the scan and the rules. Knows no rule in particular.

Every pattern is anchored at the scan's position and bounded in its repetitions, so that trying all
rules at every word takes constant time.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeVar

from triptych.modalities.tts.api.text.language import Language
from triptych.modalities.tts.api.text.numbers import NumberWords

Speak = Callable[[re.Match[str]], str | None]
"""The words for a match, or None where the rule does not apply after all."""

Kind = Literal["digit", "letter", "sign"]
"""The kind of first character that a rule matches."""
Order = Literal["mdy", "dmy"]
Method = TypeVar("Method", bound=Callable[..., str | None])

_SHARED: Mapping[str, str] = MappingProxyType(
    {
        "num": r"(?:\d{1,3}(?:,\d{3}){1,12}(?!\d)|\d{1,2}(?:,\d{2}){1,6},\d{3}(?!\d)|\d{1,40})"
        r"(?:\.\d{1,40})?",
        "end": r"(?![\w])",
        "dash": r"(?:-| ?[–‒] ?)",
    }
)
_FRAGMENT = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Reads the text that `pattern` matches at the scan's position."""

    pattern: re.Pattern[str]
    speak: Speak


@dataclass(frozen=True, slots=True)
class ReadingStyle:
    """How to read text: the tables, the number words and the order of ambiguous dates."""

    language: Language
    numbers: NumberWords
    order: Order
    spells_acronyms: bool = True


def reads(pattern: str, *kinds: Kind) -> Callable[[Method], Method]:
    """Register a method of a `RuleGroup` for `pattern`, and for first characters of `kinds`.

    A method may be registered several times.
    """

    def mark(method: Method) -> Method:
        method.__dict__.setdefault("patterns", []).insert(0, (pattern, kinds))
        return method

    return mark


class RuleGroup:
    """A group of rules: the methods marked with `reads`, tried in the order of their definition.

    In their patterns `{name}` stands for the entry of `fragments` with that name.
    """

    def __init__(self, style: ReadingStyle, **fragments: str) -> None:
        self._style = style
        self._lang = style.language
        self._say = style.numbers
        self._fragments = {**_SHARED, **fragments}

    def rules(self, kind: Kind) -> Iterator[Rule]:
        """The rules for texts that begin with a `kind`, in the order in which they are tried."""
        for name, method in vars(type(self)).items():
            for pattern, kinds in getattr(method, "patterns", ()):
                if kind in kinds:
                    yield Rule(re.compile(self.fill(pattern)), getattr(self, name))

    def fill(self, pattern: str) -> str:
        """Replace the names of fragments in `pattern`."""
        while (full := _FRAGMENT.sub(self._fragment, pattern)) != pattern:
            pattern = full
        return full

    def _fragment(self, match: re.Match[str]) -> str:
        return self._fragments[match[1]]


def word_before(match: re.Match[str]) -> str:
    """The word directly before the match and its spaces; empty if a sign is there."""
    text, end = match.string, match.start()
    while end > 0 and text[end - 1] == " ":
        end -= 1
    begin = end
    while begin > 0 and end - begin < 40 and (text[begin - 1].isalnum() or text[begin - 1] == "'"):
        begin -= 1
    return text[begin:end]


def word_after(match: re.Match[str]) -> str:
    """The word after the match and one space; empty if anything else follows."""
    text, begin = match.string, match.end()
    if text[begin : begin + 1] == " ":
        begin += 1
    end = begin
    while end < match.endpos and end - begin < 40 and text[end].isalpha():
        end += 1
    return text[begin:end]


def is_sentence_end(match: re.Match[str]) -> bool:
    """Whether nothing but closing marks follows the match in its sentence."""
    rest = match.string[match.end() : min(match.endpos, match.end() + 20)]
    return not rest.strip(" \n\"')!?.…") and match.end() + 20 > match.endpos


def with_full_stop(words: str, match: re.Match[str]) -> str:
    """The words of a match; keeps a full stop that also ended the sentence."""
    if not match[0].endswith(".") or not is_sentence_end(match):
        return words
    return words if match.string[match.end() : match.end() + 1] in tuple(".!?…") else f"{words}."


def is_attached(match: re.Match[str]) -> bool:
    """Whether the match is the numeric part of a name: "B2B", "COVID-19", "F-16"."""
    before = match.string[max(0, match.start() - 2) : match.start()]
    return before[-1:].isalpha() or (before[-1:] == "-" and before[:1].isalpha())


def is_singular(numeral: str) -> bool:
    """Whether a noun after `numeral` is singular."""
    return numeral == "1"
