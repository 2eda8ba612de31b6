"""The times of spoken words, from the ends of the ids that speak them.

Owns which ids are a word's, and when a word is over. Knows neither engines nor models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from triptych.modalities.tts.api.results import SpokenWord
from triptych.modalities.tts.api.text.spoken import Span


class WordIds(NamedTuple):
    """The ids `start .. stop - 1` of a segment speak the source's characters `source`.

    Marks before and after a word are none of its ids: their sound is a pause. Where only a space
    separates a word from the next, it is the word's last id, which `shares_space`: half of its time
    is the next word's, as in the package `kokoro` 0.9.4 (`KPipeline.join_timestamps`).
    """

    source: Span
    start: int
    stop: int
    shares_space: bool = False


class WordClock:
    """The words of the segments of one call, in order, as the ends of their ids become known.

    Words are heard `lag_s` before the ends of their ids. They never overlap, also where ids end in
    sound that was cut.
    """

    def __init__(self, text: str, lag_s: float = 0.0) -> None:
        self._text, self._lag_s = text, lag_s
        self._waiting: deque[WordIds] = deque()
        self._ends_s: list[float] = []
        self._start_s = self._said_until_s = 0.0
        self._shared_s: float | None = None
        self._held: tuple[Span, float, float] | None = None

    def begin(self, words: Sequence[WordIds], start_s: float) -> None:
        """Begin a segment whose sound starts at `start_s` of the call's."""
        self._waiting.extend(words)
        self._ends_s.clear()
        self._start_s, self._shared_s = start_s, None

    def take(self, ends_s: Sequence[float]) -> Iterator[SpokenWord]:
        """Take the ends of the segment's next ids, and return the words that are over."""
        self._ends_s.extend(ends_s)
        while self._waiting and self._waiting[0].stop <= len(self._ends_s):
            yield from self._say(self._waiting.popleft())

    def end(self, end_s: float) -> Iterator[SpokenWord]:
        """End the segment, and with it its last word; `end_s` counts from the segment's start.

        It may sound on after its ids where no mark follows it. A segment whose model sent no ends
        has no words.
        """
        if self._ends_s:
            last = max([0, *(word.stop for word in self._waiting)])
            yield from self.take([end_s] * (last - len(self._ends_s)))
        self._waiting.clear()
        if self._held is not None:
            source, start_s, _ = self._held
            yield self._word(source, start_s, self._start_s + end_s)
            self._held = None

    def _say(self, word: WordIds) -> Iterator[SpokenWord]:
        """Words with one source, such as those of a number, are one word: it waits for the next."""
        before_s = self._shared_s
        if before_s is None:
            before_s = self._heard_s(word.start)
        after_s = max(before_s, self._heard_s(word.stop, shares_last=word.shares_space))
        self._shared_s = after_s if word.shares_space else None
        start_s, end_s = self._start_s + before_s, self._start_s + after_s
        if self._held is not None and word.source.start < self._held[0].end:
            source, start_s, _ = self._held
            self._held = (Span(source.start, max(source.end, word.source.end)), start_s, end_s)
            return
        if self._held is not None:
            yield self._word(*self._held)
        self._held = (word.source, start_s, end_s)

    def _heard_s(self, stop: int, *, shares_last: bool = False) -> float:
        """When the sound of the first `stop` ids ends, without half of the last if that is shared.

        It counts from the segment's start.
        """
        if not stop:
            return 0.0
        num_last = 1 + (shares_last and stop > 1)
        end_s = sum(self._ends_s[stop - num_last : stop]) / num_last
        return max(0.0, end_s - self._lag_s)

    def _word(self, source: Span, start_s: float, end_s: float) -> SpokenWord:
        start_s = max(start_s, self._said_until_s)
        self._said_until_s = end_s = max(start_s, end_s)
        text = self._text[slice(*source)].strip()
        place = (source.start, source.end)
        return SpokenWord(text=text, start_s=start_s, end_s=end_s, source=place)
