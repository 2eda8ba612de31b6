"""Measures how much of a text has been spoken.

Owns the coverage of one request: which utterances were spoken, and how far. Knows nothing of
engines except durations and finish reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.modalities.tts.api.text.chunks import Utterance
from triptych.modalities.tts.api.text.guard import ExpectedDuration
from triptych.modalities.tts.wire import SpeechFinish


def spoken_fraction(
    reason: SpeechFinish | None, duration_s: float, expected: ExpectedDuration
) -> float:
    """The fraction of an utterance that `duration_s` of sound has spoken, judged by durations.

    An engine that stopped by itself has spoken everything, unless faster than speech can be. One
    that was cut off, was in a loop or still speaks (None) has spoken in proportion to the likely
    duration.
    """
    if expected.likely_s <= 0:
        return 1.0
    whole_s = expected.least_s if reason == "stop" else expected.likely_s
    return 1.0 if duration_s >= whole_s else max(0.0, duration_s / whole_s)


@dataclass(slots=True)
class Coverage:
    """The letters expected and spoken of one request."""

    _num_letters: int = 0
    _num_spoken_letters: int = 0

    def expect(self, utterance: Utterance) -> None:
        """Add an utterance to the expected text, whether it will be spoken or not."""
        self._num_letters += _letters(utterance.spoken.text)

    def speak(self, utterance: Utterance, fraction: float = 1.0) -> None:
        """Record that the first `fraction` (0 to 1) of an expected utterance has been spoken."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError("a fraction must be between 0 and 1")
        text = utterance.spoken.text
        self._num_spoken_letters += _letters(text[: round(fraction * len(text))])

    def add(self, other: Coverage) -> None:
        """Add what was expected and spoken of another text."""
        self._num_letters += other._num_letters
        self._num_spoken_letters += other._num_spoken_letters

    def miss(self, text: str) -> None:
        """Add a text that will not be spoken."""
        self._num_letters += _letters(text)

    @property
    def fraction(self) -> float:
        """Spoken letters divided by expected ones; 1.0 where there was nothing to speak."""
        return self._num_spoken_letters / self._num_letters if self._num_letters else 1.0

    def header(self) -> str:
        """The fraction for a response header: "1.000" only if nothing is missing."""
        return f"{int(self.fraction * 1000) / 1000:.3f}"


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))
