"""Finds the sentences of a text that are in another language than English.

Owns the evidence and its weights. Knows no voice and no pronunciation; the caller's dictionary
decides whether a word is English.

English reading rules pronounce every word in Latin letters, so nothing else would reveal that a
text was misread. Names and loan words are no evidence: they occur in English.

Short phrases have no function words, so the lists hold everyday words as well. Classifiers that
count letters were tried instead: on two words they take names and jargon for another language more
often than they find one.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from triptych.core.process.once import once
from triptych.core.process.typed import convert
from triptych.modalities.tts.api.text.sentences import split_sentences
from triptych.modalities.tts.api.text.spoken import Span, SpokenText, merge_spans

_CHUNK = re.compile(r"\S+")
_WORD = re.compile(r"[\"'“‘„«¿¡(*]*(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)[\"'”’“»)*.,;:!?…]*\Z")
_ENOUGH_UNKNOWN = 4
_UNKNOWN_TO_KNOWN = 3
"""Thresholds for a language that no list covers: this many unknown words, and this many times as
many as known ones. Fewer suffice if they are the whole sentence and it begins with a capital:
jargon mostly does not.
"""
_ENDING = re.compile(r"(?:[^\Wb-df-hj-np-tv-xz]+[mnrst]?|s)\Z")
_LEAST_STEM = 5
"""Minimum letters of a stem; shorter ones are too ambiguous."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The word lists of foreign.toml and vocabulary.toml, which document each list."""

    english: frozenset[str]
    shared: frozenset[str]
    articles: frozenset[str]
    particles: frozenset[str]
    foreign: frozenset[str]
    vocabulary: frozenset[str]
    german: frozenset[str]


@once
def evidence() -> Evidence:
    """Load the word lists."""
    data = _read("foreign.toml")
    tables = {"foreign": data.pop("words"), "vocabulary": _read("vocabulary.toml")}
    tables["german"] = {name: words["de"] for name, words in tables.items()}
    whole = {name: " ".join(words.values()) for name, words in tables.items()}
    lists = {name: text.split() for name, text in {**data, **whole}.items()}
    return convert(lists, Evidence)


def is_english_text(text: str) -> bool:
    """Whether `text` has several words that only English has, and no sentence in another language.

    One may be a loan. Without a dictionary, so that other words are no evidence of English.
    """
    lists = evidence()
    words = [_words(text, start, end) for start, end, _ in split_sentences(text)]
    num_english = sum(word.lower() in lists.english for sentence in words for word in sentence)
    return num_english > 1 and not any(_verdict(each, lambda _: True) for each in words)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.toml.decode(files(__package__).joinpath(name).read_bytes())
    return data


def foreign_spans(spoken: SpokenText, is_english: Callable[[str], bool]) -> tuple[Span, ...]:
    """The sentences of `spoken` that are not English; adjacent ones are merged.

    A sentence without evidence ("Nr. 5!") has the language of the previous one, or at the beginning
    of the next one. `is_english` receives words in lower case; if it accepts every word, only the
    words of the lists count.
    """
    verdicts = [(span, _verdict(words, is_english)) for span, words in _sentences(spoken)]
    is_foreign = next((verdict for _, verdict in verdicts if verdict is not None), False)
    spans: list[Span] = []
    for span, verdict in verdicts:
        is_foreign = is_foreign if verdict is None else verdict
        if is_foreign:
            spans.append(span)
    return merge_spans(spans)


def _sentences(spoken: SpokenText) -> Iterator[tuple[Span, list[str]]]:
    """Each sentence with the words of the original text in it."""
    written = _as_written(spoken)
    ends = (0, *(at for at, _ in spoken.breaks), len(written))
    for start, end in pairwise(ends):
        if start < end:
            yield Span(start, end), _words(written, start, end)


def _words(text: str, start: int, end: int) -> list[str]:
    chunks = map(_WORD.match, _CHUNK.findall(text, start, end))
    return [match["word"] for match in chunks if match]


def _as_written(spoken: SpokenText) -> str:
    """The text with spaces in place of rewritten words and of words with given phonemes."""
    given = [pronunciation.spoken for pronunciation in spoken.pronunciations]
    pieces, end = [], 0
    for start, stop in sorted([*spoken.rewritten, *given]):
        pieces += [spoken.text[end:start], " " * (stop - max(start, end))]
        end = max(end, stop)
    return "".join([*pieces, spoken.text[end:]])


class _WordClass(Enum):
    """The evidence that a word gives of the language of its sentence."""

    ENGLISH = auto()
    KNOWN = auto()
    """In an English dictionary, and possibly in other languages."""
    LISTED = auto()
    """Only in other languages."""
    UNKNOWN = auto()
    """In lower case, so no name, and in no English dictionary."""
    PARTICLE = auto()
    """Joins the parts of a name, or is a word of other languages."""
    SHARED = auto()
    """Occurs in English and in other languages, or is quoted in English texts."""
    MAYBE_NAME = auto()
    """Begins with a capital, and is in no list."""


def _verdict(words: list[str], is_english: Callable[[str], bool]) -> bool | None:
    """Whether a sentence is foreign; `None` without evidence."""
    count = Counter(map(partial(_classify, is_english=is_english), _with_context(words)))
    num_listed, num_english = count[_WordClass.LISTED], count[_WordClass.ENGLISH]
    num_known, num_unknown = count[_WordClass.KNOWN], count[_WordClass.UNKNOWN]
    num_telling = len(words) - count[_WordClass.SHARED]
    foreign = num_listed + num_unknown
    if foreign and not num_english:
        foreign += count[_WordClass.PARTICLE]
    english = num_english + num_known / 2
    is_foreign = False
    if num_listed > num_english and foreign > english:
        is_foreign = num_listed > 1 or (not num_known and 2 * foreign >= num_telling)
    if not is_foreign and not num_english and num_unknown > 1:
        is_all = words[0].istitle() and foreign == num_telling
        is_foreign = is_all or foreign >= max(_ENOUGH_UNKNOWN, _UNKNOWN_TO_KNOWN * num_known)
    if is_foreign:
        return True
    return False if english else None


class _WordInContext(NamedTuple):
    word: str
    following: str
    """The next word, or an empty string."""
    is_first: bool

    @property
    def is_before_lower(self) -> bool:
        return self.following.islower()


def _with_context(words: list[str]) -> Iterator[_WordInContext]:
    for index, (word, following) in enumerate(pairwise((*words, ""))):
        yield _WordInContext(word, following, index == 0)


def _classify(here: _WordInContext, is_english: Callable[[str], bool]) -> _WordClass:
    lists, word = evidence(), here.word
    lower = word.lower().replace("’", "'")
    is_cased = word.islower() or (here.is_first and word[1:].islower())
    word_class = _WordClass.MAYBE_NAME
    if not word.islower() and is_cased and here.is_before_lower and lower in lists.articles:
        word_class = _WordClass.LISTED
    elif word.islower() and lower in lists.particles:
        word_class = _WordClass.PARTICLE
    elif lower in lists.english:
        word_class = _WordClass.ENGLISH
    elif lower in lists.shared:
        word_class = _WordClass.SHARED
    elif is_cased:
        word_class = _classify_unlisted(here, lower, is_english)
    return word_class


def _classify_unlisted(
    here: _WordInContext, lower: str, is_english: Callable[[str], bool]
) -> _WordClass:
    """The evidence of a word that is cased normally and in no list of English texts."""
    lists, is_lower = evidence(), here.word.islower()
    word_class = _WordClass.KNOWN if is_lower else _WordClass.MAYBE_NAME
    if (
        lower in lists.foreign
        or (lower in lists.vocabulary and not _may_be_name(here))
        or (is_lower and _is_accented(lower, is_english))
    ):
        word_class = _WordClass.LISTED
    elif not _is_known(lower, is_english):
        if is_lower and _is_inflected(lower):
            word_class = _WordClass.LISTED
        elif is_lower or here.is_before_lower:
            word_class = _WordClass.UNKNOWN
    return word_class


def _may_be_name(here: _WordInContext) -> bool:
    """Whether a word begins a name ("Ponte Vecchio"). Excludes two German nouns in a row."""
    two = {here.word.lower(), here.following.lower()}
    is_title = not here.word.islower() and here.following[:1].isupper()
    return is_title and not two <= evidence().german


def _is_accented(word: str, is_english: Callable[[str], bool]) -> bool:
    """Whether English spells a word neither with its accents nor without, unlike "naïve"."""
    return not word.isascii() and not is_english(_without_accents(word))


def _is_inflected(word: str) -> bool:
    """Whether a word, or a part of it, differs from a listed word by its ending alone."""
    return any(_stem(part) in _stems() for part in word.split("-"))


@once
def _stems() -> frozenset[str]:
    stems = map(_stem, evidence().foreign | evidence().vocabulary)
    return frozenset(stem for stem in stems if len(stem) >= _LEAST_STEM)


def _stem(word: str) -> str:
    return _ENDING.sub("", word)


def _is_known(word: str, is_english: Callable[[str], bool]) -> bool:
    return len(word) == 1 or all(map(is_english, _without_accents(word).split("-")))


def _without_accents(word: str) -> str:
    return unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
