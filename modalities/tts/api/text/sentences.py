"""Finds where sentences and paragraphs end, as spans that tile the text.

Owns sentence boundaries. Reads raw text as well as cleaned text; knows nothing of speech.

The rules are a single pass over the terminators: abbreviations within a sentence, initials,
decimals, quotations, ellipses and list marks are the cases in which a full stop ends nothing.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from triptych.modalities.tts.api.text.language import english
from triptych.modalities.tts.api.text.spoken import Boundary

_STOP = re.compile(
    r"(?P<hard>\n(?:\s*\n\s*|\s*(?=(?:[-*+•‣◦]|\d{1,3}[.)]|[A-Za-z]\))[ \t]\S)))"
    r"|(?P<wide>[。！？]+[\"'”’」』）)]*\s*)"
    r"|(?<![.!?…])(?P<plain>[.!?…]++[\"'”’»)\]]*+)(?=\s|\Z)"
)
_SPELLED = re.compile(r"(?:\A|(?<=[ \-(\"'\n]))[A-Z] [A-Z]\Z")
_SPACE = re.compile(r"\s*")
_OPENERS = "\"'“‘«([¿¡*_#"
_DOTTED = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]\Z")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z])\Z")
_MAX_WORD = 40  # no abbreviation is longer


class SentenceSpan(NamedTuple):
    """The characters `start:end`, with the white space after them, and the kind of their end."""

    start: int
    end: int
    boundary: Boundary


def split_sentences(text: str) -> tuple[SentenceSpan, ...]:
    """The sentences of `text` in order; together they tile the text."""
    return tuple(_Splitter(text).run())


class _Splitter:
    def __init__(self, text: str) -> None:
        self._text = text
        self._language = english()
        self._start = 0  # of the open sentence

    def run(self) -> Iterator[SentenceSpan]:
        text = self._text
        for stop in _STOP.finditer(text):
            end = _SPACE.match(text, stop.end()).end()  # type: ignore[union-attr]  # matches always
            if stop["hard"]:
                boundary = Boundary.PARAGRAPH
            elif stop["wide"] or self._ends_sentence(stop, end):
                is_hard = _is_hard(text, stop.end(), end)
                boundary = Boundary.PARAGRAPH if is_hard else Boundary.SENTENCE
            else:
                continue
            if text[self._start : end].strip():
                yield SentenceSpan(self._start, end, boundary)
                self._start = end
        if self._start < len(text):
            yield SentenceSpan(self._start, len(text), Boundary.PARAGRAPH)

    def _ends_sentence(self, stop: re.Match[str], end: int) -> bool:
        text = self._text
        if end == len(text) or _is_hard(text, stop.end(), end):
            return True
        after = self._next_word(end)
        if after[:1].islower():
            return False
        marks = stop["plain"]
        if not marks.startswith(".") or len(marks.rstrip("\"'”’»)]")) > 1:
            return True
        return self._dot_ends(stop.start(), after)

    def _next_word(self, at: int) -> str:
        """The word after `at`, without opening quotes and brackets; empty before a sign."""
        text = self._text
        while at < len(text) and text[at] in _OPENERS:
            at += 1
        end = at
        while end < len(text) and end - at < _MAX_WORD and text[end].isalnum():
            end += 1
        return text[at:end]

    def _dot_ends(self, dot: int, after: str) -> bool:
        """Whether the full stop at `dot` ends its sentence, when the next word is `after`."""
        lang, text = self._language, self._text
        begin = max(
            (text.rfind(c, max(0, dot - _MAX_WORD), dot) + 1 for c in ' \n\t("“'), default=0
        )
        word = text[max(begin, dot - _MAX_WORD) : dot].lstrip("'‘[")
        if _LIST_NUMBER.match(word) and self._begins_at(dot - len(word)):
            return False
        if after[:1].isdigit() and (word in lang.numbered or self._is_month_or_day(word)):
            return False
        # The last capital of several ("F B I.") is no initial.
        is_spelled = len(word) == 1 and _SPELLED.search(text, max(0, dot - 4), dot) is not None
        if is_spelled or not self._is_abbreviation(word):
            return True
        if word == "etc":
            return after[:1].isupper()
        is_inner = word in lang.inner or (word in lang.titles and not self._is_street(word, dot))
        return not is_inner and after in lang.words.starters

    def _is_street(self, word: str, dot: int) -> bool:
        """Whether the abbreviation before `dot` follows a name ("Main St."), not precedes one."""
        before = self._text[max(0, dot - _MAX_WORD) : dot - len(word)].rstrip(" ")
        return word in self._language.streets and before[before.rfind(" ") + 1 :][:1].isupper()

    def _begins_at(self, at: int) -> bool:
        """Whether the open sentence begins with the word at `at`."""
        before = self._text[self._start : min(at, self._start + _MAX_WORD)]
        return not any(map(str.isalnum, before))

    def _is_abbreviation(self, word: str) -> bool:
        """Whether a full stop after `word` belongs to it, and need not end a sentence."""
        lang = self._language
        is_listed = any(word in table for table in (lang.titles, lang.inner, lang.final))
        is_initial = len(word) == 1 and word.isupper()
        is_dotted = _DOTTED.match(word) is not None
        return is_listed or is_initial or is_dotted or self._is_month_or_day(word)

    def _is_month_or_day(self, word: str) -> bool:
        words = self._language.words
        names = (*words.months, *words.weekdays)
        return 3 <= len(word) <= 5 and any(n != word and n.startswith(word) for n in names)


def _is_hard(text: str, start: int, end: int) -> bool:
    return text.count("\n", start, end) > 1
