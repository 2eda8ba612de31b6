"""Rules for words not read as written: abbreviations, acronyms, Roman numerals, mixed names.

Owns how letters are read. Knows nothing of numbers with units and of addresses.
"""

from __future__ import annotations

import re

from triptych.modalities.tts.api.text.language import alternatives
from triptych.modalities.tts.api.text.rules import (
    ReadingStyle,
    RuleGroup,
    is_sentence_end,
    reads,
    with_full_stop,
    word_after,
    word_before,
)

_ROMAN = re.compile(r"(M{0,3})(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})\Z")
_ROMAN_DIGITS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_SPELT_CLUSTER = re.compile(r"[^AEIOUY]{4}|^[^AEIOUY]{3}|[AEIOU]{4}|[^AEIOUYLRSNMTDKPCGHWFX]{2}$")
_VOWEL = re.compile(r"[AEIOUY]")
_AFTER_I = frozenset({"am", "was", "have", "had", "will", "would", "can", "think", "do", "did"})
_BARE_TITLES = frozenset({"Dr", "Mr", "Mrs", "Ms", "Prof", "St"})
_MAX_NAMELESS_ROMAN = 39  # larger ones without a cue are rarely numerals


class PhraseRules(RuleGroup):
    """The rule for tokens that are listed as a whole; it runs before all others."""

    def __init__(self, style: ReadingStyle) -> None:
        super().__init__(style, phrases=alternatives(style.language.phrases))

    @reads(r"(?<!\w){phrases}(?:(?<=\W)|{end})", "digit", "letter", "sign")
    def _phrase(self, match: re.Match[str]) -> str:
        return with_full_stop(self._lang.phrases[match[0]], match)


class NameRules(RuleGroup):
    """The rules for words and for signs in names; they run after all others."""

    def __init__(self, style: ReadingStyle) -> None:
        lang = style.language
        super().__init__(
            style,
            abbreviations=alternatives({**lang.inner, **lang.final}),
            cues=alternatives(lang.words.roman_cues),
            numbered=alternatives(lang.numbered),
            titles=alternatives({**lang.titles, **lang.streets}),
        )

    @reads(r"(?<!\w)({numbered})\. ?(?=\d)", "letter")
    def _numbered(self, match: re.Match[str]) -> str:
        return self._lang.numbered[match[1]]

    @reads(r"(?<![^\W\d_.])({titles})(\.?){end}", "letter")
    def _title(self, match: re.Match[str]) -> str | None:
        word, dot = match[1], match[2]
        is_name_next = word_after(match)[:1].isupper() and not is_sentence_end(match)
        if word in self._lang.streets and self._is_street(match, is_name_next):
            return with_full_stop(self._lang.streets[word], match)
        if is_name_next and (dot or word in _BARE_TITLES):
            return self._lang.titles[word]
        return with_full_stop(self._lang.titles[word], match) if dot else None

    def _is_street(self, match: re.Match[str], is_name_next: bool) -> bool:
        before = word_before(match)
        if is_name_next:
            return before[:1].isdigit()  # "5th St. East", but "visit St. Paul"
        is_named = _is_name(before) and before not in self._lang.words.starters
        return is_named or (match[1] == "St" and bool(match[2]))

    @reads(r"(?<![^\W\d_.])({abbreviations})\.(?!\w)", "letter")
    def _abbreviation(self, match: re.Match[str]) -> str:
        word = match[1]
        return with_full_stop(self._lang.inner.get(word) or self._lang.final[word], match)

    @reads(r"(?<![^\W\d_.])((?:[A-Za-z]\.){2,8}[A-Za-z]?)(?![\w])", "letter")
    def _initialism(self, match: re.Match[str]) -> str:
        return with_full_stop(" ".join(match[1].replace(".", "").upper()), match)

    @reads(r"(?<![^\W\d_.'])(?<!(?<![\w°])[A-Z] )([A-Z])\.(?!\w*\.)", "letter")
    def _initial(self, match: re.Match[str]) -> str | None:
        return None if is_sentence_end(match) else match[1]

    @reads(r"(?<!\w)({cues}) ([IVXLCDM]{1,12}){end}(?! [A-Z]{end})", "letter")
    def _chapter(self, match: re.Match[str]) -> str | None:
        value = _roman(match[2])
        if value is None or (match[2] == "I" and word_after(match) in _AFTER_I):
            return None
        return f"{match[1]} {self._say.cardinal(value)}"

    @reads(r"(?<!\w)([IVX]{1,8})(?!\w|\.\w| [A-Z](?!\w))", "letter")
    def _numeral(self, match: re.Match[str]) -> str | None:
        numeral, before = match[1], word_before(match)
        value = _roman(numeral)
        if value is None or value > _MAX_NAMELESS_ROMAN:
            return None
        if word_after(match).startswith("centur"):
            return self._say.ordinal(value)
        if not _is_name(before) or not match.string.startswith(" ", match.start() - 1):
            return self._say.cardinal(value) if len(numeral) > 2 and numeral != "XXX" else None
        if before in self._lang.words.regnal:
            is_pronoun = numeral == "I" and (
                word_after(match) in _AFTER_I or is_sentence_end(match)
            )
            return None if is_pronoun else f"the {self._say.ordinal(value)}"
        return None if len(numeral) == 1 or numeral == "IV" else self._say.cardinal(value)

    @reads(r"(?<!\w)[vV](?=\d)", "letter")
    def _version(self, match: re.Match[str]) -> str:
        return "version"

    @reads(r"([A-Z]{2,12})('?s)?(?![^\W\d_])", "letter")
    def _acronym(self, match: re.Match[str]) -> str | None:
        if not self._style.spells_acronyms:
            return None
        is_coded = match[2] or match.string[match.end() : match.end() + 1].isdecimal()
        words = self._capitals(match[1], is_shouted=not is_coded and _is_shouted(match))
        return None if words is None else words + self._suffix(match[2], words)

    @reads(r"(?<![^\W\d_])[^\W\d_](?!\w)", "letter")
    def _greek(self, match: re.Match[str]) -> str | None:
        return self._lang.greek.get(match[0])

    def _suffix(self, suffix: str | None, words: str) -> str:
        if not suffix:
            return ""
        return "'s" if len(words) > 1 and words[-2] == " " else suffix

    def _capitals(self, word: str, *, is_shouted: bool) -> str | None:
        """How a word in capitals is read; None if it is unchanged."""
        words = self._lang.words
        if word in words.said:
            return None
        if word in words.emphasis:
            return word.lower()
        is_short = len(word) < 4 and not is_shouted
        if word in words.spelled or is_short or not _is_pronounceable(word):
            return " ".join(word)
        return word.lower()


def _is_shouted(match: re.Match[str]) -> bool:
    """Whether the words around are also in capitals, so that capitals do not mark an acronym."""
    around = match.string[max(0, match.start() - 40) : match.end() + 40]
    letters = [char for char in around if char.isalpha()]
    return len(letters) >= 12 and sum(map(str.isupper, letters)) > 0.8 * len(letters)


def _is_name(word: str) -> bool:
    return len(word) > 1 and word[0].isupper() and word[1:].islower()


def _is_pronounceable(word: str) -> bool:
    return _VOWEL.search(word) is not None and _SPELT_CLUSTER.search(word) is None


def _roman(numeral: str) -> int | None:
    if not numeral or not _ROMAN.match(numeral):
        return None
    values = [_ROMAN_DIGITS[char] for char in numeral]
    return sum(-v if v < after else v for v, after in zip(values, [*values[1:], 0], strict=True))
