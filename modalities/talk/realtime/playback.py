"""The part of an answer that a listener has heard: it is sent faster than it is played.

Owns the estimate: the client plays each piece as it arrives, one after another. A client knows
better, and says so with `conversation.item.truncate`. Pure: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.modalities.talk.realtime.items import ConversationItem

ECHO_MS = 500.0
"""How much later than estimated the microphone's sound may still have the answer's end: both ways,
the client's buffer and its devices take time."""


@dataclass(slots=True)
class SpeechPlayback:
    """The answer that was spoken last.

    Times are milliseconds of the session's clock; inside, of one that stands while sound is held.
    """

    entry: ConversationItem | None = None
    response_id: str = ""
    _until_ms: float = 0.0
    _held_ms: float | None = None
    _lost_ms: float = 0.0
    _pieces: list[tuple[float, float]] = field(default_factory=list)

    def add(
        self, response_id: str, entry: ConversationItem, now_ms: float, sound_ms: float
    ) -> None:
        """Note sound that was sent."""
        if entry is not self.entry:
            self.entry, self.response_id, self._pieces = entry, response_id, []
        begin_ms = max(self._clock(now_ms), self._until_ms)
        self._pieces.append((begin_ms, sound_ms))
        self._until_ms = begin_ms + sound_ms

    def remaining_ms(self, now_ms: float) -> float:
        """How much is still to be played."""
        return max(0.0, self._until_ms - self._clock(now_ms))

    def may_echo(self, now_ms: float) -> bool:
        """Whether the user's sound may have an echo of the answer."""
        return self.entry is not None and self._clock(now_ms) < self._until_ms + ECHO_MS

    def hold(self, now_ms: float) -> None:
        """Play nothing until `resume`."""
        self._held_ms = now_ms

    def resume(self, now_ms: float) -> bool:
        """Go on where `hold` stopped; returns whether it did."""
        if self._held_ms is None:
            return False
        self._lost_ms += now_ms - self._held_ms
        self._held_ms = None
        return True

    def interrupt(self, now_ms: float) -> int | None:
        """Stop playing; returns the milliseconds that were heard if some were not."""
        clock_ms = self._clock(now_ms)
        if self.entry is None or clock_ms >= self._until_ms:
            return None
        self._until_ms = clock_ms
        return int(sum(min(ms, max(0.0, clock_ms - begin_ms)) for begin_ms, ms in self._pieces))

    def _clock(self, now_ms: float) -> float:
        return (now_ms if self._held_ms is None else self._held_ms) - self._lost_ms
