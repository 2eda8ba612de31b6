"""Pronunciations given in the text: `[Kokoro](/kˈOkəɹO/)`.

Owns that notation and how it is separated from the text: the word stays, its phonemes are stored
separately, and offsets still refer to the original text.
"""

# ruff: noqa: RUF002  # phonetic letters look like others
from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from triptych.modalities.tts.api.text.spoken import AlignedSpan, Pronunciation, Span, SpokenText

_NOTATION = re.compile(r"\[(?P<word>[^\[\]\n]{1,200})\]\(/(?P<phonemes>[^/()\n]{1,200})/\)")


class Notation(NamedTuple):
    """One word with its phonemes: the word's span in the plain text, the notation's in the source.

    In the source the word begins one character after `source` does.
    """

    plain: Span
    source: Span
    phonemes: str


def extract_notations(text: str) -> tuple[str, tuple[Notation, ...]]:
    """`text` with each notation reduced to its word, and the notations."""
    pieces, notations, end, length = [], [], 0, 0
    for match in _NOTATION.finditer(text):
        pieces += [text[end : match.start()], match["word"]]
        start = length + match.start() - end
        length = start + len(match["word"])
        notations.append(Notation(Span(start, length), Span(*match.span()), match["phonemes"]))
        end = match.end()
    return "".join([*pieces, text[end:]]), tuple(notations)


def restore_notations(spoken: SpokenText, notations: tuple[Notation, ...]) -> SpokenText:
    """The spoken form of the plain text, with the source's offsets and the pronunciations."""
    if not notations:
        return spoken
    cuts = sorted({at for notation in notations for at in notation.plain})
    pieces = [piece for segment in spoken.segments for piece in _cut(segment, cuts)]
    segments = tuple(_restore(piece, notations) for piece in pieces)
    given = (_pronunciation(notation, pieces) for notation in notations)
    return SpokenText(spoken.text, segments, spoken.breaks, tuple(filter(None, given)))


def _cut(segment: AlignedSpan, cuts: list[int]) -> Iterator[AlignedSpan]:
    """Split an aligned segment where a notation's word begins or ends."""
    start, stop = segment.source
    inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, stop)] if segment.is_aligned else []
    shift = segment.spoken.start - start
    for left, right in zip([start, *inner], [*inner, stop], strict=True):
        spoken = Span(left + shift, right + shift) if inner else segment.spoken
        yield AlignedSpan(spoken, Span(left, right), segment.is_aligned)


def _restore(piece: AlignedSpan, notations: tuple[Notation, ...]) -> AlignedSpan:
    source = Span(*(_source_at(at, notations) for at in piece.source))
    is_aligned = piece.is_aligned and source.end - source.start == len(range(*piece.spoken))
    return AlignedSpan(piece.spoken, source, is_aligned)


def _source_at(plain: int, notations: tuple[Notation, ...]) -> int:
    """Map an offset of the plain text to the source; brackets belong to their word."""
    place = bisect_left(notations, plain, key=lambda notation: notation.plain.start)
    if place == 0:
        return plain
    before = notations[place - 1]
    if plain < before.plain.end:
        return before.source.start + 1 + plain - before.plain.start
    return plain + before.source.end - before.plain.end


def _pronunciation(notation: Notation, pieces: list[AlignedSpan]) -> Pronunciation | None:
    """The spoken span of a notation's word; None if it was read as one with its neighbours."""
    start, end = notation.plain
    first = bisect_left(pieces, start, key=_source_start)
    last = bisect_right(pieces, end, key=_source_start)
    inside = [
        piece.spoken
        for piece in pieces[first:last]
        if piece.source.end <= end and piece.spoken.end > piece.spoken.start
    ]
    if not inside:
        return None
    return Pronunciation(Span(inside[0].start, inside[-1].end), notation.phonemes)


def _source_start(piece: AlignedSpan) -> int:
    return piece.source.start
