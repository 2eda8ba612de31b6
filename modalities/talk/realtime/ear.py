"""The ear of a session: the turns in its sound, and the transcriber of the present one.

Owns the sound of the last moments, from which a turn that was just detected begins. Knows no
events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.talk.ports import (
    HEARING_RATE,
    Hearing,
    IdleTimedOut,
    LiveTranscriber,
    TurnDetector,
    TurnEvent,
    TurnOptions,
)

KEPT_S = 6.0
"""Seconds before the present that a turn may begin at: the longest padding, and its detection."""


class Ear:
    """One stream of sound. `open_transcriber` opens one for a turn."""

    def __init__(self, hearing: Hearing, open_transcriber: Callable[[], LiveTranscriber]) -> None:
        self._hearing = hearing
        self._open_transcriber = open_transcriber
        self._detector: TurnDetector | None = None
        self._detector_start_ms = 0
        self._recent: list[Pcm] = []
        self._num_recent = self._num_heard = self._num_in_turn = 0
        self._transcriber: LiveTranscriber | None = None

    def listen(self, options: TurnOptions | None) -> None:
        """Detect turns with these options; `None`: detect none."""
        self._detector = None if options is None else self._hearing.open_detector(options)
        self._detector_start_ms = self._num_heard * 1000 // HEARING_RATE

    def push(self, pcm_S: Pcm) -> None:
        """Take the next samples."""
        self._recent.append(pcm_S)
        self._num_recent += len(pcm_S)
        self._num_heard += len(pcm_S)
        if self._transcriber is not None:
            self._push_on(self._transcriber, pcm_S)

    @property
    def turn_s(self) -> float:
        """Seconds of sound in the present turn."""
        return self._num_in_turn / HEARING_RATE

    @property
    def detects(self) -> bool:
        """Whether turns are detected."""
        return self._detector is not None

    def detect(self, pcm_S: Pcm, *, is_answering: bool) -> list[TurnEvent]:
        """Return what samples that were pushed begin and end. It may run on a thread."""
        if self._detector is None:
            return []
        events = self._detector.push(pcm_S, is_answering=is_answering)
        return [_later(event, self._detector_start_ms) for event in events]

    def forget(self) -> None:
        """Drop what is too old to begin a turn."""
        while self._recent and self._num_recent - len(self._recent[0]) > KEPT_S * HEARING_RATE:
            self._num_recent -= len(self._recent.pop(0))

    def rest(self) -> None:
        """Count silence from here (see `TurnDetector.rest`)."""
        if self._detector is not None:
            self._detector.rest()

    def begin(self, at_ms: int | None) -> LiveTranscriber:
        """Open the transcriber of a turn that began at `at_ms`, or begins now."""
        transcriber = self._open_transcriber()
        self._num_in_turn = 0
        if at_ms is not None:
            self._push_on(transcriber, self._since(at_ms))
        self._transcriber = transcriber
        return transcriber

    def take(self) -> LiveTranscriber | None:
        """Return the transcriber of the present turn, and push nothing more to it."""
        transcriber, self._transcriber = self._transcriber, None
        self._num_in_turn = 0
        return transcriber

    def reset(self) -> None:
        """Forget speech that is under way, and what was heard."""
        self._recent, self._num_recent = [], 0
        if self._detector is not None:
            self._detector.reset()

    def _push_on(self, transcriber: LiveTranscriber, pcm_S: Pcm) -> None:
        self._num_in_turn += len(pcm_S)
        if len(pcm_S):
            transcriber.push(pcm_S)

    def _since(self, at_ms: int) -> Pcm:
        start = at_ms * HEARING_RATE // 1000
        first = self._num_heard - self._num_recent
        pieces: Sequence[Pcm] = self._recent or [np.zeros(0, np.float32)]
        joined: Pcm = np.concatenate(pieces)
        return joined[max(0, start - first) :]


def _later(event: TurnEvent, offset_ms: int) -> TurnEvent:
    """Return an event of a detector's clock by the clock of the session."""
    if isinstance(event, IdleTimedOut):
        return IdleTimedOut(event.start_ms + offset_ms, event.end_ms + offset_ms)
    return replace(event, at_ms=event.at_ms + offset_ms)
