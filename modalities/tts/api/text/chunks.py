"""Splits long text into utterances that an engine speaks one at a time.

Owns where speech may be cut. The caller sets the length of an utterance. Knows nothing of engines.
"""

# ruff: noqa: RUF001  # typographic signs are the subject here
from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from typing import NamedTuple

from triptych.modalities.tts.api.text.spoken import Boundary, Span, SpokenText

_TOKEN = re.compile(r"[^\s、，；：。！？]*[、，；：。！？]*\s*")
CLAUSE_ENDS = (",", ";", ":", "—", "…", ")", "、", "，", "；", "：")
"""Marks after which speech may be cut inside a sentence."""
SENTENCE_ENDS = tuple(".!?…。！？।॥؟۔")
"""Marks that end a sentence of a text as it is written, also in Hindi and Arabic."""
CLOSERS = " \"')”’»›」』）"
"""Signs that may follow such a mark."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """One piece of speech. The sources of a text's utterances tile the whole text, in order.

    `boundary` is the unit that ends with this utterance, which determines the pause after it.
    """

    spoken: SpokenText
    boundary: Boundary

    @property
    def text(self) -> str:
        """The text to speak. Its offsets are those of `spoken`."""
        return self.spoken.text.rstrip()

    @property
    def source(self) -> Span:
        """The stretch of the user's text that this speaks."""
        return self.spoken.source


class _Atom(NamedTuple):
    """An indivisible unit: a word with its punctuation, or a piece of an overlong word."""

    start: int
    end: int
    boundary: Boundary


def split_utterances(
    spoken: SpokenText, most: int, first_most: Sequence[int] = ()
) -> Iterator[Utterance]:
    """Cut `spoken` at the best places, lazily.

    An utterance has at most `most` characters; `first_most` gives smaller limits for the first
    ones, so that sound begins sooner. A cut is made at the end of a paragraph or sentence where
    there is one, preferably in the second half of what fits; else at a clause; else between words;
    inside a word only if the word alone is too long.
    """
    least = min(most, *first_most) if first_most else most
    if least <= 0:
        raise ValueError("the limits of an utterance must be positive")
    window: list[_Atom] = []
    start = 0
    limits = chain(first_most, repeat(most))
    limit = next(limits)
    for atom in _atoms(spoken, least):
        while window and atom.end - start > limit:
            num = _best_cut(window, start, limit)
            last = window[num - 1]
            yield Utterance(spoken.slice(start, last.end), last.boundary)
            start, limit = last.end, next(limits)
            del window[:num]
        window.append(atom)
    if window:
        yield Utterance(spoken.slice(start, len(spoken.text)), window[-1].boundary)


def _best_cut(window: list[_Atom], start: int, most: int) -> int:
    """How many of the atoms the next utterance takes."""
    ranks = [_rank(atom.boundary, is_late=2 * (atom.end - start) >= most) for atom in window]
    return max(range(1, len(window) + 1), key=lambda num: (ranks[num - 1], num))


def _rank(boundary: Boundary, *, is_late: bool) -> float:
    """Preference among cuts: an early paragraph is no better than an early sentence."""
    return boundary if is_late else min(boundary, Boundary.SENTENCE) - 0.5


def _atoms(spoken: SpokenText, most: int) -> Iterator[_Atom]:
    """Words in order; tokens without letters belong to the previous word, or to the first."""
    text, start, strongest = spoken.text, 0, Boundary.INSIDE
    cuts = _cuts(spoken)
    next_ends = [end for end, _ in cuts[1:]]
    for (end, boundary), next_end in zip_longest(cuts, next_ends):
        strongest = max(strongest, boundary)
        is_voiced = _has_letter(text, start, end) and _has_letter(text, end, next_end or end)
        if is_voiced or next_end is None:
            yield from _split_to_fit(text, _Atom(start, end, strongest), most)
            start, strongest = end, Boundary.INSIDE


def _has_letter(text: str, start: int, end: int) -> bool:
    return any(map(str.isalpha, text[start:end]))


def _cuts(spoken: SpokenText) -> list[tuple[int, Boundary]]:
    """Every place where the text may be cut, and the unit that ends there."""
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
        elif match[0].rstrip(CLOSERS).endswith(CLAUSE_ENDS) or match[0].rstrip().endswith(")"):
            boundary = Boundary.CLAUSE
        cuts.append((end, breaks.get(end, boundary)))
    if cuts:
        cuts[-1] = (len(text), Boundary.PARAGRAPH)
    return cuts


def _rewritten_insides(spoken: SpokenText) -> frozenset[int]:
    """Offsets of words inside a token that was written as one: "three | dollars" of "$3"."""
    return frozenset(
        segment.spoken.start + at + 1
        for segment in spoken.segments
        if not segment.is_aligned
        for at, char in enumerate(spoken.text[segment.spoken.start : segment.spoken.end - 1])
        if char == " "
    )


def _split_to_fit(text: str, atom: _Atom, most: int) -> Iterator[_Atom]:
    """The word itself if it fits, else its halves until they fit."""
    start, end, boundary = atom
    middle = (start + end) // 2
    while start < middle and not text[middle].isalpha():
        middle -= 1  # keep an accent or a mark with its letter
    if end - start <= most or not _has_letter(text, start, middle):
        yield atom
        return
    yield from _split_to_fit(text, _Atom(start, middle, Boundary.INSIDE), most)
    yield from _split_to_fit(text, _Atom(middle, end, boundary), most)
