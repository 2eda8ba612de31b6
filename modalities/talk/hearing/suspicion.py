"""The suspicion that speech has begun, before that is certain.

Owns which frame is suspicious, and how long a suspicion lasts. Its clock is the sound. Knows
neither models of speech nor how turns begin and end.
"""

from __future__ import annotations

from triptych.modalities.talk.ports import SpeechDismissed, SpeechSuspected

SUSPICIOUS_SHARE = 0.15
"""A frame from this share of the threshold on may be the beginning of speech: chosen by
`samples/benchmarks/barge_in.py`."""
CALM_MS = 700
"""It stands out if all frames were below that for so long."""
LONGEST_MS = 250
"""A suspicion that is not confirmed for so long is dismissed."""


class Suspicion:
    """Suspicions from one probability of speech per frame. Pure; frames may overlap."""

    def __init__(self, threshold: float) -> None:
        self._least = SUSPICIOUS_SHARE * threshold
        self._calm_from_ms = 0
        self._since_ms: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is one that is neither confirmed nor dismissed."""
        return self._since_ms is not None

    def take(
        self, probability: float, begin_ms: int, end_ms: int, *, is_speaking: bool
    ) -> SpeechSuspected | SpeechDismissed | None:
        """Take a frame; returns the event that it causes, none while someone is speaking."""
        calm_ms = end_ms - self._calm_from_ms
        is_suspicious = probability >= self._least
        if is_suspicious:
            self._calm_from_ms = end_ms
        if is_speaking:
            self._since_ms = None
        elif self._since_ms is not None:
            return self._dismiss_late(end_ms)
        elif is_suspicious and calm_ms >= CALM_MS:
            self._since_ms = end_ms
            return SpeechSuspected(begin_ms)
        return None

    def forget(self) -> None:
        """Forget a suspicion, as after a clear."""
        self._since_ms = None

    def _dismiss_late(self, now_ms: int) -> SpeechDismissed | None:
        assert self._since_ms is not None
        if now_ms - self._since_ms < LONGEST_MS:
            return None
        self._since_ms = None
        return SpeechDismissed(now_ms)
