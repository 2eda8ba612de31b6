"""From written text to the words to speak, with the source of every character.

Owns the scan: one pass over the cleaned text, sentence by sentence, in which the first matching
rule supplies the words and everything else is copied. Knows no rule in particular and nothing of
speech.

With the rules of a language, the result holds letters, spaces and the marks that shape prosody:
`. , ; : ! ? … — - ' " ( )` and their wide forms. Text that is already in this form is unchanged.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from triptych.modalities.tts.api.text.addresses import AddressRules
from triptych.modalities.tts.api.text.clean import Cleaned, Emoji, clean
from triptych.modalities.tts.api.text.dashes import Dashes
from triptych.modalities.tts.api.text.dates import DateRules
from triptych.modalities.tts.api.text.grouping import Grouping
from triptych.modalities.tts.api.text.language import alternatives, english
from triptych.modalities.tts.api.text.markup import strip_markup
from triptych.modalities.tts.api.text.names import NameRules, PhraseRules
from triptych.modalities.tts.api.text.numbers import NumberWords
from triptych.modalities.tts.api.text.pronunciations import extract_notations, restore_notations
from triptych.modalities.tts.api.text.quantities import QuantityRules
from triptych.modalities.tts.api.text.rules import ReadingStyle, Rule
from triptych.modalities.tts.api.text.sentences import SentenceSpan, split_sentences
from triptych.modalities.tts.api.text.spoken import Boundary, SpokenBuilder, SpokenText
from triptych.modalities.tts.api.text.tongues import Reading, is_english, tongue

_MARKS = frozenset(".,;:!?…—\"'()¿¡。、！？，；：・")
_GLUED = frozenset(".,;:!?…")  # a space is inserted between these and a word
_MAX_SILENCE = 8  # maximum run of characters without sound


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizeOptions:
    """Options for reading ambiguous text.

    `dialect` is the language; that of English sets the order of dates like 3/4/2024, and whether
    "and" stands in numbers. With `None`, digits and signs stay as they are written. `acronyms`
    "keep" leaves them to an engine with its own rules; `emoji` are dropped or named. `tags` in
    angle brackets are unchanged: <laugh> is a command to some engines.
    """

    dialect: Reading | None = "us"
    acronyms: Literal["spell", "keep"] = "spell"
    emoji: Emoji = "drop"
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """How a language speaks what is not letters: its rules by first character, and its signs.

    `prepare` classifies numerals and dashes in cleaned text.
    """

    digit: tuple[Rule, ...]
    letter: tuple[Rule, ...]
    sign: tuple[Rule, ...]
    signs: Mapping[str, str]
    operators: Mapping[str, str]
    dot: str
    slash: str
    prepare: Callable[[str], str]


def _english(options: NormalizeOptions) -> _Words:
    lang, is_us = english(), options.dialect == "us"
    style = ReadingStyle(
        lang,
        NumberWords(use_and=not is_us),
        "mdy" if is_us else "dmy",
        options.acronyms == "spell",
    )
    kinds = (PhraseRules, DateRules, AddressRules, QuantityRules, NameRules)
    groups = [kind(style) for kind in kinds]
    dashes, grouping = Dashes(lang), Grouping(lang)
    return _Words(
        digit=tuple(rule for group in groups for rule in group.rules("digit")),
        letter=tuple(rule for group in groups for rule in group.rules("letter")),
        sign=tuple(rule for group in groups for rule in group.rules("sign")),
        signs={
            **{unit: many for unit, (_, many) in lang.units.items()},
            **lang.symbols,
            **{sign: names[0] for sign, names in lang.currencies.items()},
        },
        operators=lang.operators,
        dot="dot",
        slash="slash",
        prepare=lambda text: dashes(grouping(text)),
    )


_AS_WRITTEN = _Words(
    digit=(), letter=(), sign=(), signs={}, operators={}, dot="", slash="", prepare=str
)


def _foreign(reading: Reading) -> _Words:
    table = tongue(reading)
    numbers = tuple(table.rules())
    return _Words(
        digit=numbers,
        letter=tuple(table.word_rules()),
        sign=numbers,
        signs=table.signs,
        operators={sign: word for sign, word in table.signs.items() if sign in "+=×÷"},
        dot=table.signs["."],
        slash=table.signs["/"],
        prepare=str,
    )


class Normalizer:
    """Normalizes text of one language. Stateless after construction, thread-safe."""

    def __init__(self, options: NormalizeOptions | None = None) -> None:
        self._options = options or NormalizeOptions()
        dialect = self._options.dialect
        if dialect is None:
            words = _AS_WRITTEN
        else:
            words = _english(self._options) if is_english(dialect) else _foreign(dialect)
        tag = Rule(re.compile(f"<{alternatives(self._options.tags)}>"), lambda match: match[0])
        self._words = words
        self._sign = (*((tag,) if self._options.tags else ()), *words.sign)
        operators = alternatives(words.operators)
        self._operator = re.compile(rf"( ?)({operators})\1(?=[\w(])")

    def __call__(self, text: str) -> SpokenText:
        """The words of `text`, in linear time. Given pronunciations are kept."""
        plain, notations = extract_notations(text)
        cleaned = self._clean(plain)
        scan = _Scan(cleaned)
        for sentence in split_sentences(cleaned.text):
            self._read(scan, sentence)
        return restore_notations(scan.finish(len(plain)), notations)

    def _clean(self, plain: str) -> Cleaned:
        """Plain characters with numerals and dashes classified, and their offsets in `plain`."""
        unmarked = strip_markup(plain)
        cleaned = clean(unmarked.text, emoji=self._options.emoji)
        starts = [unmarked.starts[at] for at in cleaned.starts]
        if cleaned.text:
            starts[0] = 0
        return Cleaned(self._words.prepare(cleaned.text), starts)

    def _read(self, scan: _Scan, sentence: SentenceSpan) -> None:
        text, at, end = scan.text, sentence.start, sentence.end
        body_end = at + len(text[at:end].rstrip())
        while at < body_end:
            char = text[at]
            if char.isspace():
                at = scan.space(at + 1)
                continue
            if self._words is _AS_WRITTEN:
                at = scan.copy(at, _run_end(text, at, body_end))
                continue
            found = self._find(text, at, body_end)
            if found:
                at = scan.say(found[1], at, found[0])
            elif char.isalpha():
                at = scan.copy(at, _word_end(text, at, body_end))
            else:
                at = self._speak_sign(scan, at, body_end)
        scan.end_sentence(end, sentence.boundary)

    def _find(self, text: str, at: int, end: int) -> tuple[int, str] | None:
        """The end and the words of the first rule that matches at `at`."""
        char = text[at]
        words = self._words
        rules = words.digit if char.isdecimal() else words.letter if char.isalpha() else self._sign
        if rules is self._sign and (operator := self._operator_at(text, at, end)):
            return at + len(operator), words.operators[operator]
        for rule in rules:
            match = rule.pattern.match(text, at, end)
            if match and match.end() > at:
                spoken = rule.speak(match)
                if spoken is not None:
                    return match.end(), spoken
        return None

    def _speak_sign(self, scan: _Scan, at: int, end: int) -> int:
        text, char = scan.text, scan.text[at]
        before, after = text[at - 1 : at] if at else "", text[at + 1 : min(at + 2, end)]
        if char == "." and before.isalnum() and (after.islower() or after.isdecimal()):
            return scan.say(self._words.dot, at, at + 1)
        if char in _MARKS or unicodedata.category(char)[0] == "M":
            return scan.copy(at, at + 1)
        if char in "-–":
            return self._dash(scan, at, before, after)
        if char == "/" and before.isalnum() and after.isalnum():
            return scan.say(self._words.slash, at, at + 1)
        word = self._words.signs.get(char)
        if word and after != char:
            return scan.say(word, at, at + 1)
        is_alone = (before, after) == (" ", " ")
        return scan.say("—", at, at + 1) if is_alone else scan.drop(at + 1)

    def _operator_at(self, text: str, at: int, end: int) -> str | None:
        """The operator at `at` if it is between two operands, evenly spaced."""
        is_spaced = text[at - 1 : at] == " "
        match = self._operator.match(text, at - is_spaced, end)
        if match is None or (is_spaced and not match[1]) or match.start(2) != at:
            return None
        start, stop = match.span()
        left, right = text[max(0, start - 2) : start], text[stop : stop + 2]
        num_digits = left[-1:].isdecimal() + right[:1].isdecimal()
        if match[2] in ("-", "/") and (not is_spaced or not num_digits):
            return None
        is_between = _is_operand(left[-1:], left[:-1], ")") and _is_operand(
            right[:1], right[1:], "("
        )
        return match[2] if is_between else None

    def _dash(self, scan: _Scan, at: int, before: str, after: str) -> int:
        """Copy a hyphen that joins words; replace any other dash by a pause."""
        is_joint = before.isalnum() and after.isalpha()
        if scan.text[at] == "-" and is_joint:
            return scan.copy(at, at + 1)
        if after == "-" and before in ("", " ") and not scan.text.startswith(" ", at + 2):
            return scan.drop(at + 2)
        if scan.text[at] == "–" or (before, after) == (" ", " ") or after == "-":
            return scan.say("—", at, at + (2 if after == "-" else 1))
        return scan.drop(at + 1)


def _is_operand(near: str, far: str, bracket: str) -> bool:
    """Whether the character next to an operator is an operand's; `far` is the one beyond it."""
    return near.isdecimal() or near == bracket or (near.isalpha() and not far.isalnum())


def _word_end(text: str, at: int, end: int) -> int:
    while at < end and _is_letter(text[at]):
        at += 1
    return at


def _run_end(text: str, at: int, end: int) -> int:
    while at < end and not text[at].isspace():
        at += 1
    return at


def _is_letter(char: str) -> bool:
    """Whether `char` is a letter or a sign that belongs to one, such as a vowel sign of Hindi."""
    return char.isalpha() or (char != "" and unicodedata.category(char)[0] == "M")


class _Scan:
    """The output of the scan: spacing, silence and the offset map."""

    def __init__(self, cleaned: Cleaned) -> None:
        self.text = cleaned.text
        self._starts = cleaned.starts
        self._builder = SpokenBuilder()
        self._last = ""  # the last character emitted
        self._num_silent = 0  # characters emitted since the last letter or digit
        self._is_spaced = False  # a space is pending before the next word
        self._is_letter = False  # the last word is one capital; a dot would make it an initial
        self._was_said = False  # the last words came from a rule
        self._boundary: Boundary | None = None  # a sentence end to be marked with the next word

    def space(self, end: int) -> int:
        """White space up to `end`: one pending space."""
        self._is_spaced = self._last != ""
        return end

    drop = space  # a dropped sign still separates words

    def say(self, spoken: str, start: int, end: int) -> int:
        """Emit a rule's words for the characters `start:end`."""
        if self._is_mute(spoken):
            return end
        self._separate(spoken[0], is_said=True)
        self._open(self._starts[start])
        self._emit(spoken, self._starts[end], is_aligned=False)
        self._was_said = True
        return end

    def copy(self, start: int, end: int) -> int:
        """Emit the characters `start:end` unchanged."""
        text, starts = self.text, self._starts
        if self._is_mute(text[start:end]):
            return end
        self._separate(text[start], is_said=False)
        self._open(starts[start])
        if starts[end] - starts[start] == end - start:
            self._emit(text[start:end], starts[end], is_aligned=True)
        else:
            for at in range(start, end):
                is_aligned = starts[at + 1] - starts[at] == 1
                self._emit(text[at], starts[at + 1], is_aligned=is_aligned)
        self._was_said = False
        return end

    def end_sentence(self, end: int, boundary: Boundary) -> None:
        """Close the sentence; a paragraph without a final mark gets one."""
        if self.text.endswith("\n", 0, end) and _is_letter(self._last):
            mark = "," if self._is_letter else "."
            self._emit(mark, self._starts[end - 1], is_aligned=False)
        if self.text[end - 1].isspace():
            self.space(end)
        self._boundary = boundary if self._last else None

    def finish(self, source_length: int) -> SpokenText:
        """The whole text, once everything has been read."""
        return self._builder.build(source_length)

    def _is_mute(self, spoken: str) -> bool:
        """Whether `spoken` would only prolong a silence."""
        return self._num_silent >= _MAX_SILENCE and not any(map(str.isalnum, spoken))

    def _separate(self, char: str, *, is_said: bool) -> None:
        """Set a pending space where two words would touch."""
        if char.isalpha() and not self._is_spaced:
            is_word = _is_letter(self._last) and (is_said or self._was_said)
            self._is_spaced = is_word or self._last in _GLUED or (is_said and self._last == ")")

    def _open(self, source: int) -> None:
        """Emit the pending space, for the source up to `source`; mark the sentence's end."""
        if self._is_spaced and self._last:
            self._builder.add(" ", source, is_aligned=False)
            self._num_silent += 1
            self._is_spaced, self._last = False, " "
        elif source > self._builder.source:
            self._builder.add("", source, is_aligned=False)
        if self._boundary is not None:
            self._builder.mark(self._boundary)
            self._boundary = None

    def _emit(self, spoken: str, source_end: int, *, is_aligned: bool) -> None:
        self._builder.add(spoken, source_end, is_aligned=is_aligned)
        is_alone = len(spoken) == 1 or spoken[-2:-1] == " "
        self._is_letter = is_alone and spoken[-1].isupper() and not _is_letter(self._last)
        self._last = spoken[-1]
        at = len(spoken)
        while at and not (spoken[at - 1].isdecimal() or _is_letter(spoken[at - 1])):
            at -= 1
        self._num_silent = len(spoken) - at + (0 if at else self._num_silent)
