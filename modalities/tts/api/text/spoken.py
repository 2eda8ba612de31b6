"""Spoken text and its exact map back to the user's text.

Owns spans, segments and how they are cut. Knows nothing of languages or of speech.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Span(NamedTuple):
    """A half-open range of characters."""

    start: int
    end: int


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of `spans`, in order; none overlaps or touches the next."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, end))
        else:
            merged.append(Span(start, end))
    return tuple(merged)


def intersect_spans(some: Iterable[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """The intersection; neither argument's spans overlap each other."""
    pairs = ((max(a.start, b.start), min(a.end, b.end)) for a in some for b in others)
    return tuple(Span(start, end) for start, end in pairs if start < end)


class Boundary(IntEnum):
    """How natural a pause is at a place; greater is better."""

    INSIDE = 0
    WORD = 1
    CLAUSE = 2
    SENTENCE = 3
    PARAGRAPH = 4


class Break(NamedTuple):
    """A sentence or paragraph ends just before the spoken character `at`."""

    at: int
    boundary: Boundary


class AlignedSpan(NamedTuple):
    """The text `spoken`, produced from `source`; an aligned segment maps character by character."""

    spoken: Span
    source: Span
    is_aligned: bool


class Pronunciation(NamedTuple):
    """The given phonemes for the spoken characters `spoken`."""

    spoken: Span
    phonemes: str


@dataclass(frozen=True, slots=True)
class SpokenText:
    """Text to speak. Its segments tile both the text and the source, in order.

    A segment may be empty on the spoken side (a dropped emoji), so every source character belongs
    to exactly one segment. Source offsets count from the start of the user's text, also in slices.
    `foreign` are the stretches in another language than that of the reading rules.
    """

    text: str
    segments: tuple[AlignedSpan, ...]
    breaks: tuple[Break, ...] = ()
    pronunciations: tuple[Pronunciation, ...] = ()
    foreign: tuple[Span, ...] = ()
    _ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", [segment.spoken.end for segment in self.segments])

    @property
    def source(self) -> Span:
        """The stretch of the source that this text speaks."""
        if not self.segments:
            return Span(0, 0)
        return Span(self.segments[0].source.start, self.segments[-1].source.end)

    @property
    def rewritten(self) -> tuple[Span, ...]:
        """The words that differ from the source.

        A single letter that is not aligned is excluded: only a mark before or after it was dropped.
        """
        unaligned = (segment.spoken for segment in self.segments if not segment.is_aligned)
        return tuple(span for span in unaligned if span.end - span.start > 1)

    @property
    def is_silent(self) -> bool:
        """Whether the text has no letters or digits, so that its speech would be empty."""
        return not any(map(str.isalnum, self.text))

    def source_at(self, position: int) -> int:
        """Map the spoken offset `position` to the offset at which to cut the source.

        Inside a rewritten segment the cut is placed in proportion, so cuts never go backwards.
        """
        index = bisect_right(self._ends, position)
        if index == len(self.segments):
            return self.source.end
        spoken, source, is_aligned = self.segments[index]
        inside = max(0, position - spoken.start)
        if is_aligned:
            return source.start + inside
        return source.start + inside * (source.end - source.start) // (spoken.end - spoken.start)

    def source_of(self, spoken: Span) -> Span:
        """The source of a stretch, with the whole source of every rewritten part of it."""
        cut = [
            (low, source, is_aligned)
            for low, source, is_aligned in self.segments
            if low.start < spoken.end and low.end > spoken.start
        ]
        if not cut:
            return Span(self.source_at(spoken.start), self.source_at(spoken.end))
        (first, start, first_aligned), (last, end, last_aligned) = cut[0], cut[-1]
        low = max(spoken.start - first.start, 0) if first_aligned else 0
        high = max(last.end - spoken.end, 0) if last_aligned else 0
        return Span(start.start + low, end.end - high)

    def slice(self, start: int, end: int) -> SpokenText:
        """The spoken characters `start:end`; adjacent slices have adjacent sources."""
        stop = bisect_right(self._ends, end)
        first = bisect_right(self._ends, start) if start else 0
        segments = [self._clip(segment, start, end) for segment in self.segments[first : stop + 1]]
        return SpokenText(
            self.text[start:end],
            tuple(kept for kept in segments if kept is not None),
            tuple(Break(at - start, what) for at, what in self.breaks if start < at <= end),
            tuple(
                Pronunciation(Span(span.start - start, min(span.end, end) - start), phonemes)
                for span, phonemes in self.pronunciations
                if start <= span.start < end
            ),
            tuple(
                Span(max(span.start, start) - start, min(span.end, end) - start)
                for span in self.foreign
                if span.start < end and span.end > start
            ),
        )

    def _clip(self, segment: AlignedSpan, start: int, end: int) -> AlignedSpan | None:
        spoken, source, is_aligned = segment
        if spoken.start >= end and spoken.end > end:
            return None
        low, high = max(spoken.start, start), min(spoken.end, end)
        clipped = Span(
            source.start if low == spoken.start else self.source_at(low),
            source.end if high == spoken.end else self.source_at(high),
        )
        return AlignedSpan(Span(low - start, high - start), clipped, is_aligned)


class SpokenBuilder:
    """Collects segments in source order; `build` checks that they tile the source."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._segments: list[AlignedSpan] = []
        self._breaks: list[Break] = []
        self._length = 0
        self._source = 0

    @property
    def source(self) -> int:
        """The source offset up to which segments were added."""
        return self._source

    def add(self, spoken: str, source_end: int, *, is_aligned: bool) -> None:
        """Add `spoken` for the source from the last segment's end up to `source_end`."""
        assert source_end >= self._source
        segment = AlignedSpan(
            Span(self._length, self._length + len(spoken)),
            Span(self._source, source_end),
            is_aligned,
        )
        self._length, self._source = segment.spoken.end, source_end
        self._pieces.append(spoken)
        if is_aligned and self._segments and self._segments[-1].is_aligned:
            last = self._segments.pop()
            segment = AlignedSpan(
                Span(last.spoken.start, segment.spoken.end),
                Span(last.source.start, source_end),
                True,
            )
        self._segments.append(segment)

    def mark(self, boundary: Boundary) -> None:
        """Record that a sentence or paragraph ends here."""
        if self._length:
            self._breaks.append(Break(self._length, boundary))

    def build(self, source_length: int) -> SpokenText:
        """The finished text; source after the last segment becomes a silent one."""
        if self._source < source_length:
            self.add("", source_length, is_aligned=False)
        return SpokenText("".join(self._pieces), tuple(self._segments), tuple(self._breaks))
