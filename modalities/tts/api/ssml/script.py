"""The meaning of an SSML document: passages to speak, and the pauses between them.

Owns these types, and the way from a passage's characters back to the document's. Knows neither XML
nor models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from triptych.modalities.tts.api.results import SpokenWord
from triptych.modalities.tts.api.text.spoken import Boundary, Span


class DocumentPlace(NamedTuple):
    """A place in a document, for people: lines and columns count from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


class Delivery(NamedTuple):
    """How text is spoken: `voice` and `language` are empty for those of the call."""

    voice: str = ""
    language: str = ""
    rate: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A stretch of text with one delivery.

    `sources` are the document's characters for each character of `text`; a character that stands in
    no document has an empty one. All characters of a replaced stretch have that of the whole
    stretch, and `written` has what the document says there. `pause_s` is the exact silence before
    the passage, without one it follows the passage before as a sentence does.
    """

    text: str
    sources: tuple[Span, ...]
    written: Mapping[Span, str]
    delivery: Delivery
    place: DocumentPlace
    pause_s: float | None
    boundary: Boundary
    has_english_words: bool = False

    @property
    def num_letters(self) -> int:
        """The letters and digits of the text, the measure of its share of a document."""
        return sum(map(str.isalnum, self.text))

    @property
    def num_spoken(self) -> float:
        """The characters as many as are spoken at the call's speed in the same time."""
        return len(self.text) / self.delivery.rate

    def source_of(self, start: int, end: int) -> Span:
        """The document's characters for `text[start:end]`."""
        sources = self.sources[start:end]
        return Span(sources[0].start, max(source.end for source in sources))

    def as_written(self, start: int, end: int) -> str:
        """The document's own words for `text[start:end]`, each replaced stretch once."""
        pieces: list[str] = []
        last: Span | None = None
        for char, source in zip(self.text[start:end], self.sources[start:end], strict=True):
            if source in self.written:
                pieces.append("" if source == last else self.written[source])
            elif source.end > source.start:
                pieces.append(char)
            last = source
        return "".join(pieces).strip()

    def replaced_at(self, start: int, end: int) -> Span | None:
        """The last replaced stretch that `text[start:end]` speaks a part of."""
        found = (source for source in reversed(self.sources[start:end]) if source in self.written)
        return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A document: its passages, the silence at its end, and the elements that were ignored."""

    passages: tuple[Passage, ...]
    pause_s: float
    ignored: tuple[str, ...]


@dataclass(slots=True)
class WordPlaces:
    """The words of a passage as the document has them; its sound begins `start_s` after the call's.

    The words of a replaced stretch are one word, which waits for the last of them.
    """

    passage: Passage
    start_s: float
    _held: list[SpokenWord] = field(default_factory=list)

    def take(self, words: Sequence[SpokenWord], *, is_last: bool) -> Iterator[SpokenWord]:
        """Take the next words, and return those that are complete."""
        for word in words:
            if self._held and not self._is_joined(word):
                yield self._whole()
            self._held.append(word)
            if self.passage.replaced_at(*word.source) is None:
                yield self._whole()
        if is_last and self._held:
            yield self._whole()

    def _is_joined(self, word: SpokenWord) -> bool:
        """Whether `word` begins in the replaced stretch in which the held words end."""
        start, end = word.source
        first = self.passage.sources[start:end][:1]
        return first == (self.passage.replaced_at(*self._held[-1].source),)

    def _whole(self) -> SpokenWord:
        first, last = self._held[0], self._held[-1]
        self._held.clear()
        span = first.source[0], last.source[1]
        source = self.passage.source_of(*span)
        return replace(
            first,
            text=self.passage.as_written(*span),
            start_s=self.start_s + first.start_s,
            end_s=self.start_s + last.end_s,
            source=(source.start, source.end),
        )
