"""Which sentences of a text are in another language than English.

Owns the evidence and how it is weighed. Knows no voice and no pronunciation; whether a word is
English is the caller's dictionary's to say.

A reader with English rules says something for every word in Latin letters, so that nothing else
would show that a text was read wrong. Names and loan words are no evidence: they stand in English.

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
from triptych.modalities.tts.api.text.spoken import Span, SpokenText, merge_spans

_CHUNK = re.compile(r"\S+")
_WORD = re.compile(r"[\"'“‘„«¿¡(*]*(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)[\"'”’“»)*.,;:!?…]*\Z")
_ENOUGH_UNKNOWN = 4
_UNKNOWN_TO_KNOWN = 3
"""So many unknown words, and so many times the known ones, are a language that no list here has. So
are fewer if they are all there is, and begin as a sentence does: jargon mostly does not."""
_ENDING = re.compile(r"(?:[^\Wb-df-hj-np-tv-xz]+[mnrst]?|s)\Z")
_LEAST_STEM = 5
"""Letters; what is left of shorter words says little."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The word lists of foreign.toml and vocabulary.toml, which say what each is for."""

    english: frozenset[str]
    shared: frozenset[str]
    articles: frozenset[str]
    particles: frozenset[str]
    foreign: frozenset[str]
    vocabulary: frozenset[str]
    german: frozenset[str]


@once
def evidence() -> Evidence:
    """The word lists."""
    data = _read("foreign.toml")
    tables = {"foreign": data.pop("words"), "vocabulary": _read("vocabulary.toml")}
    tables["german"] = {name: words["de"] for name, words in tables.items()}
    whole = {name: " ".join(words.values()) for name, words in tables.items()}
    lists = {name: text.split() for name, text in {**data, **whole}.items()}
    return convert(lists, Evidence)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.toml.decode(files(__package__).joinpath(name).read_bytes())
    return data


def foreign_spans(spoken: SpokenText, is_english: Callable[[str], bool]) -> tuple[Span, ...]:
    """The sentences of `spoken` that are not English, joined where they are neighbours.

    A sentence that shows nothing ("Nr. 5!") is of the language of the one before it, at the
    beginning of the one after it. `is_english` is asked about words in lower case; where it says so
    of every word, only the words of the lists count.
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
    """Each sentence with the words in it that its writer spelled."""
    written = _as_written(spoken)
    ends = (0, *(at for at, _ in spoken.breaks), len(written))
    for start, end in pairwise(ends):
        if start < end:
            chunks = map(_WORD.match, _CHUNK.findall(written, start, end))
            yield Span(start, end), [match["word"] for match in chunks if match]


def _as_written(spoken: SpokenText) -> str:
    """The text with spaces where words are the normalizer's, or have phonemes of the writer's."""
    given = [pronunciation.spoken for pronunciation in spoken.pronunciations]
    pieces, end = [], 0
    for start, stop in sorted([*spoken.rewritten, *given]):
        pieces += [spoken.text[end:start], " " * (stop - max(start, end))]
        end = max(end, stop)
    return "".join([*pieces, spoken.text[end:]])


class _Shows(Enum):
    """What a word shows of the language of its sentence."""

    ENGLISH = auto()
    KNOWN = auto()
    """An English dictionary has it, and other languages may, too."""
    LISTED = auto()
    """Only other languages have it."""
    UNKNOWN = auto()
    """It is in lower case, so no name, and stands in no English dictionary."""
    PARTICLE = auto()
    """It joins the parts of a name, or is a word of other languages."""
    SHARED = auto()
    """English and other languages have it, or English texts quote it."""
    MAYBE_NAME = auto()
    """It begins with a capital, and no list has it."""


def _verdict(words: list[str], is_english: Callable[[str], bool]) -> bool | None:
    """Whether a sentence is foreign; `None` where it shows nothing."""
    count = Counter(map(partial(_shows, is_english=is_english), _with_context(words)))
    num_listed, num_english = count[_Shows.LISTED], count[_Shows.ENGLISH]
    num_known, num_unknown = count[_Shows.KNOWN], count[_Shows.UNKNOWN]
    num_telling = len(words) - count[_Shows.SHARED]
    foreign = num_listed + num_unknown
    if foreign and not num_english:
        foreign += count[_Shows.PARTICLE]
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


class _InContext(NamedTuple):
    word: str
    following: str
    """The next word, if there is one."""
    is_first: bool

    @property
    def is_before_lower(self) -> bool:
        return self.following.islower()


def _with_context(words: list[str]) -> Iterator[_InContext]:
    for index, (word, following) in enumerate(pairwise((*words, ""))):
        yield _InContext(word, following, index == 0)


def _shows(place: _InContext, is_english: Callable[[str], bool]) -> _Shows:
    lists, word = evidence(), place.word
    lower = word.lower().replace("’", "'")
    is_cased = word.islower() or (place.is_first and word[1:].islower())
    shows = _Shows.MAYBE_NAME
    if not word.islower() and is_cased and place.is_before_lower and lower in lists.articles:
        shows = _Shows.LISTED
    elif word.islower() and lower in lists.particles:
        shows = _Shows.PARTICLE
    elif lower in lists.english:
        shows = _Shows.ENGLISH
    elif lower in lists.shared:
        shows = _Shows.SHARED
    elif is_cased:
        shows = _weighed(place, lower, is_english)
    return shows


def _weighed(place: _InContext, lower: str, is_english: Callable[[str], bool]) -> _Shows:
    """What a word shows that is no name by its letters' case, and in no list of English texts."""
    lists, is_lower = evidence(), place.word.islower()
    shows = _Shows.KNOWN if is_lower else _Shows.MAYBE_NAME
    if (
        lower in lists.foreign
        or (lower in lists.vocabulary and not _may_be_name(place))
        or (is_lower and _is_marked(lower, is_english))
    ):
        shows = _Shows.LISTED
    elif not _is_known(lower, is_english):
        if is_lower and _is_inflected(lower):
            shows = _Shows.LISTED
        elif is_lower or place.is_before_lower:
            shows = _Shows.UNKNOWN
    return shows


def _may_be_name(place: _InContext) -> bool:
    """Whether a word begins a name ("Ponte Vecchio"); of two words, German writes nouns alike."""
    two = {place.word.lower(), place.following.lower()}
    is_title = not place.word.islower() and place.following[:1].isupper()
    return is_title and not two <= evidence().german


def _is_marked(word: str, is_english: Callable[[str], bool]) -> bool:
    """Whether English writes a word neither with its marks nor without them, as in "naïve"."""
    return not word.isascii() and not is_english(_unmarked(word))


def _is_inflected(word: str) -> bool:
    """Whether a listed word differs from a word, or a part of it, by its ending alone."""
    return any(_stem(part) in _stems() for part in word.split("-"))


@once
def _stems() -> frozenset[str]:
    stems = map(_stem, evidence().foreign | evidence().vocabulary)
    return frozenset(stem for stem in stems if len(stem) >= _LEAST_STEM)


def _stem(word: str) -> str:
    return _ENDING.sub("", word)


def _is_known(word: str, is_english: Callable[[str], bool]) -> bool:
    return len(word) == 1 or all(map(is_english, _unmarked(word).split("-")))


def _unmarked(word: str) -> str:
    return unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
