"""Long text into utterances that an engine speaks one at a time.

Owns where speech may be cut. What an utterance may measure is the caller's: characters, estimated
seconds, tokens or phonemes. Knows nothing of engines.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from typing import NamedTuple

from triptych.modalities.tts.api.text.spoken import Boundary, Span, SpokenText

Measure = Callable[[str], float]

_TOKEN = re.compile(r"[^\s、，；：。！？]*[、，；：。！？]*\s*")
_CLAUSE_ENDS = tuple(",;:—…)、，；：")
_CLOSERS = " \"')"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """How long an utterance may be, and how much of what was said before is handed on with it."""

    most: float
    """Greatest measure of an utterance."""
    first_most: tuple[float, ...] = ()
    """The same for each of the first utterances, smaller so that sound begins sooner."""
    measure: Measure = len
    """Of a piece of spoken text. Pieces are summed, so it should be additive."""
    num_context_characters: int = 200

    def __post_init__(self) -> None:
        if self.least <= 0:
            raise ValueError("an utterance must be allowed to be longer than nothing")

    @property
    def least(self) -> float:
        """The smallest of the greatest measures."""
        return min((self.most, *self.first_most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One piece of speech. The sources of a text's utterances are the whole text, in order.

    `context` is the end of what was spoken before, from a word's beginning on; `boundary` says
    what ends with this utterance, and so how long a pause should follow.
    """

    index: int
    spoken: SpokenText
    context: str
    boundary: Boundary

    @property
    def text(self) -> str:
        """What to speak. Its offsets are those of `spoken`."""
        return self.spoken.text.rstrip()

    @property
    def source(self) -> Span:
        """Which stretch of the user's text this speaks."""
        return self.spoken.source


class _Atom(NamedTuple):
    """What is never cut: a word with what follows it, or a piece of one too long."""

    end: int
    weight: float
    boundary: Boundary


def split_utterances(spoken: SpokenText, limits: ChunkLimits) -> Iterator[Utterance]:
    """Cut `spoken` at the best places that `limits` allow, each as it is asked for.

    A cut is made at the end of a paragraph or sentence where there is one, preferably in the
    second half of what fits; else at a clause; else between words; inside a word only if the word
    alone is too long.
    """
    window: list[_Atom] = []
    weight, start, index = 0.0, 0, 0
    allowed = chain(limits.first_most, repeat(limits.most))
    most = next(allowed)
    for atom in _atoms(spoken, limits.least, limits.measure):
        while window and weight + atom.weight > most:
            num = _best_cut(window, most)
            yield _utterance(
                spoken, Span(start, window[num - 1].end), window[num - 1], index, limits
            )
            start, index = window[num - 1].end, index + 1
            most = next(allowed)
            del window[:num]
            weight = sum(kept.weight for kept in window)
        window.append(atom)
        weight += atom.weight
    if window:
        yield _utterance(spoken, Span(start, len(spoken.text)), window[-1], index, limits)


def _utterance(
    spoken: SpokenText, span: Span, last: _Atom, index: int, limits: ChunkLimits
) -> Utterance:
    return Utterance(
        index=index,
        spoken=spoken.slice(*span),
        context=_tail(spoken.text, span.start, limits.num_context_characters),
        boundary=last.boundary,
    )


def _tail(text: str, end: int, length: int) -> str:
    """The last whole words before `end`, at most `length` characters."""
    begin = max(0, end - length)
    tail = text[begin:end]
    if begin and not text[begin - 1].isspace():
        tail = tail.partition(" ")[2]
    return tail.strip()


def _best_cut(window: list[_Atom], most: float) -> int:
    """How many of the atoms to speak now."""
    best, best_rank, weight = len(window), -1.0, 0.0
    for num, atom in enumerate(window, 1):
        weight += atom.weight
        rank = _rank(atom.boundary, is_late=2 * weight >= most)
        if rank >= best_rank:
            best, best_rank = num, rank
    return best


def _rank(boundary: Boundary, *, is_late: bool) -> float:
    """Preference among cuts: an early paragraph is no better than an early sentence."""
    return boundary if is_late else min(boundary, Boundary.SENTENCE) - 0.5


def _atoms(spoken: SpokenText, most: float, measure: Measure) -> Iterator[_Atom]:
    """Words in order; what holds no letter belongs to the word before it, or to the first."""
    text, start, strongest = spoken.text, 0, Boundary.INSIDE
    cuts = _cuts(spoken)
    next_ends = [end for end, _ in cuts[1:]]
    for (end, boundary), next_end in zip_longest(cuts, next_ends):
        strongest = max(strongest, boundary)
        is_voiced = _has_letter(text, start, end) and _has_letter(text, end, next_end or end)
        if is_voiced or next_end is None:
            yield from _fitting(text, Span(start, end), strongest, most, measure)
            start, strongest = end, Boundary.INSIDE


def _has_letter(text: str, start: int, end: int) -> bool:
    return any(map(str.isalpha, text[start:end]))


def _cuts(spoken: SpokenText) -> list[tuple[int, Boundary]]:
    """Every place where the text may be cut, and what ends there."""
    text = spoken.text
    breaks = dict(spoken.breaks)
    inside = _rewritten_insides(spoken)
    cuts = []
    for match in _TOKEN.finditer(text):
        end = match.end()
        if end == match.start():
            continue
        boundary = Boundary.WORD
        if end in inside:
            boundary = Boundary.INSIDE
        elif match[0].rstrip(_CLOSERS).endswith(_CLAUSE_ENDS) or match[0].rstrip().endswith(")"):
            boundary = Boundary.CLAUSE
        cuts.append((end, breaks.get(end, boundary)))
    if cuts:
        cuts[-1] = (len(text), Boundary.PARAGRAPH)
    return cuts


def _rewritten_insides(spoken: SpokenText) -> frozenset[int]:
    """Word beginnings inside what was written as one: "three | dollars" of "$3"."""
    return frozenset(
        segment.spoken.start + at + 1
        for segment in spoken.segments
        if not segment.is_aligned
        for at, char in enumerate(spoken.text[segment.spoken.start : segment.spoken.end - 1])
        if char == " "
    )


def _fitting(
    text: str, span: Span, boundary: Boundary, most: float, measure: Measure
) -> Iterator[_Atom]:
    """The word whole if it fits, else halved until its pieces do."""
    weight = measure(text[span.start : span.end])
    middle = (span.start + span.end) // 2
    while span.start < middle and not text[middle].isalpha():
        middle -= 1  # a cut before an accent or a mark would leave it to the next utterance
    if weight <= most or not _has_letter(text, span.start, middle):
        yield _Atom(span.end, weight, boundary)
        return
    yield from _fitting(text, Span(span.start, middle), Boundary.INSIDE, most, measure)
    yield from _fitting(text, Span(middle, span.end), boundary, most, measure)
