"""Which sentences of a text are in another language than English.

Owns the evidence and how it is weighed. Knows no voice and no pronunciation; whether a word is
English is the caller's dictionary's to say.

A reader with English rules says something for every word in Latin letters, so that nothing else
would show that a text was read wrong. Names and loan words are no evidence: they stand in English.
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
from typing import NamedTuple

import msgspec

from triptych.core.process.once import once
from triptych.core.process.typed import convert
from triptych.modalities.tts.api.text.spoken import Span, SpokenText, merge_spans

_CHUNK = re.compile(r"\S+")
_WORD = re.compile(r"[\"'“‘„«¿¡(*]*(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)[\"'”’“»)*.,;:!?…]*\Z")
_ENOUGH_UNKNOWN = 4
_UNKNOWN_TO_KNOWN = 3
"""So many unknown words, and so many times the known ones, are a language that no list here has."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The word lists of foreign.toml, which says what each is for."""

    english: frozenset[str]
    shared: frozenset[str]
    articles: frozenset[str]
    particles: frozenset[str]
    foreign: frozenset[str]


@once
def evidence() -> Evidence:
    """The word lists."""
    data = msgspec.toml.decode(files(__package__).joinpath("foreign.toml").read_bytes())
    words = " ".join(data.pop("words").values())
    lists = {name: text.split() for name, text in {**data, "foreign": words}.items()}
    return convert(lists, Evidence)


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


def _verdict(words: list[str], is_english: Callable[[str], bool]) -> bool | None:
    """Whether a sentence is foreign; `None` where it shows nothing."""
    count = Counter(map(partial(_shows, is_english=is_english), _with_context(words)))
    num_listed, num_english = count[_Shows.LISTED], count[_Shows.ENGLISH]
    foreign = num_listed + count[_Shows.UNKNOWN]
    if foreign and not num_english:
        foreign += count[_Shows.PARTICLE]
    english = num_english + count[_Shows.KNOWN] / 2
    if num_listed > num_english:
        is_foreign = foreign > english and (num_listed > 1 or 2 * foreign >= len(words))
    else:
        least = max(_ENOUGH_UNKNOWN, _UNKNOWN_TO_KNOWN * count[_Shows.KNOWN])
        is_foreign = not num_english and count[_Shows.UNKNOWN] > 1 and foreign >= least
    if is_foreign:
        return True
    return False if english else None


class _InContext(NamedTuple):
    word: str
    is_first: bool
    is_before_lower: bool


def _with_context(words: list[str]) -> Iterator[_InContext]:
    for index, (word, following) in enumerate(pairwise((*words, ""))):
        yield _InContext(word, index == 0, following.islower())


def _shows(place: _InContext, is_english: Callable[[str], bool]) -> _Shows | None:
    lists, word = evidence(), place.word
    lower = word.lower().replace("’", "'")
    is_cased = word.islower() or (place.is_first and word[1:].islower())
    shows: _Shows | None = None
    if not word.islower() and is_cased and place.is_before_lower and lower in lists.articles:
        shows = _Shows.LISTED
    elif word.islower() and lower in lists.particles:
        shows = _Shows.PARTICLE
    elif lower in lists.english:
        shows = _Shows.ENGLISH
    elif lower in lists.shared or not is_cased:
        pass  # a capital may begin a name
    elif lower in lists.foreign or (word.islower() and _is_marked(word, is_english)):
        shows = _Shows.LISTED
    elif not _is_known(lower, is_english):
        shows = _Shows.UNKNOWN if word.islower() or place.is_before_lower else None
    elif word.islower():
        shows = _Shows.KNOWN
    return shows


def _is_marked(word: str, is_english: Callable[[str], bool]) -> bool:
    """Whether English writes a word neither with its marks nor without them, as in "naïve"."""
    return not word.isascii() and not is_english(_unmarked(word))


def _is_known(word: str, is_english: Callable[[str], bool]) -> bool:
    return len(word) == 1 or all(map(is_english, _unmarked(word).split("-")))


def _unmarked(word: str) -> str:
    return unicodedata.normalize("NFKD", word).encode("ascii", "ignore").decode()
