"""The progress of one call: sound, spoken text, counts.

Owns merging the deltas of several jobs. Knows nothing of engines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.tts.api.frontend.base import PlannedSegment
from triptych.modalities.tts.api.planner import SpeechPart
from triptych.modalities.tts.api.results import SpeechPiece, SpeechUsage, SpokenWord
from triptych.modalities.tts.api.text.coverage import Coverage, spoken_fraction
from triptych.modalities.tts.api.text.guard import expected_duration
from triptych.modalities.tts.api.timing import WordClock
from triptych.modalities.tts.wire import SAMPLE_BYTES, SpeechDelta, SpeechFinish

_SILENCE = 0.01
"""Quieter samples are none of a word's."""


class SpeechProgress:
    """Progress of one call whose sound has `sample_rate` (Hz) and `speed`.

    The sound is then played `rate` times as fast, which the times of words follow. `word_lag_s`:
    see `FrontEnd`.
    """

    def __init__(
        self,
        text: str,
        sample_rate: int,
        speed: float,
        rate: float = 1.0,
        *,
        word_lag_s: float = 0.0,
    ) -> None:
        self.finish_reason: SpeechFinish = "stop"
        self._clock, self._rate = WordClock(text, word_lag_s), rate
        self._words: list[SpokenWord] = []
        self._num_before, self._is_begun = 0, False
        self._sample_rate = sample_rate
        self._speed = speed
        self._coverage = Coverage()
        self._part: SpeechPart | None = None
        self._left: deque[PlannedSegment] = deque()
        self._num_samples = self._num_loud = 0
        self._before = self._usage = SpeechUsage()

    def take(self, part: SpeechPart, delta: SpeechDelta) -> None:
        """Add a delta of the job that speaks `part`. Parts are spoken one after another."""
        if part is not self._part:
            self._part, self._before = part, self._usage
            self._left = deque(part)
            for entry in part:
                self._coverage.expect(entry.utterance)
        self._usage = self._before.plus(delta)
        self._begin_words()
        if self._left and self._left[0].words:
            self._find_end(delta.pcm)
        self._num_samples += len(delta.pcm) // SAMPLE_BYTES
        self._words += self._clock.take(delta.id_ends_s)
        if delta.segment_finish is not None:
            self._end_segment(delta.segment_finish)
        if delta.finish_reason is not None:
            self._note(delta.finish_reason)
            self._skip_silent()

    def piece(self, pcm_S: Pcm, *, is_last: bool = False) -> SpeechPiece:
        """A piece of sound with the current usage and coverage."""
        words, self._words = self._words, []
        return SpeechPiece(
            pcm_S=pcm_S,
            words=tuple(map(self._played, words)),
            usage=self._usage,
            coverage=self._coverage.fraction,
            finish_reason=self.finish_reason if is_last else None,
        )

    def _end_segment(self, reason: SpeechFinish) -> None:
        self._note(reason)
        self._skip_silent()
        if self._left:
            entry = self._left.popleft()
            heard_s = self._num_samples / self._sample_rate - entry.segment.pause_s
            fraction = spoken_fraction(
                None if reason == "cancelled" else reason,
                heard_s,
                expected_duration(entry.utterance.text, speed=self._speed),
            )
            self._coverage.speak(entry.utterance, fraction * entry.voiced_fraction)
            self._words += self._clock.end(min(heard_s, self._num_loud / self._sample_rate))
        self._num_before += self._num_samples
        self._num_samples = self._num_loud = 0
        self._is_begun = False

    def _begin_words(self) -> None:
        """Begin the words of a segment with its first delta."""
        self._skip_silent()
        if not self._is_begun and self._left:
            self._clock.begin(self._left[0].words, self._num_before / self._sample_rate)
        self._is_begun = True

    def _find_end(self, pcm: bytes) -> None:
        """Find the last loud sample, with which the segment's last word ends."""
        loud = np.flatnonzero(np.abs(np.frombuffer(pcm, "<f4")) > _SILENCE)
        if len(loud):
            self._num_loud = self._num_samples + int(loud[-1]) + 1

    def _played(self, word: SpokenWord) -> SpokenWord:
        return replace(word, start_s=word.start_s / self._rate, end_s=word.end_s / self._rate)

    def _skip_silent(self) -> None:
        """Enter the leading segments without sound into the coverage: no job speaks them."""
        while self._left and self._left[0].is_silent:
            entry = self._left.popleft()
            self._coverage.speak(entry.utterance, entry.voiced_fraction)

    def _note(self, reason: SpeechFinish) -> None:
        if self.finish_reason == "stop":
            self.finish_reason = reason
