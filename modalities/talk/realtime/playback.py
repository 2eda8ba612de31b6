"""The part of an answer that a listener has heard: it is sent faster than it is played.

Owns the estimate: the client plays each piece as it arrives, one after another. A client knows
better, and says so with `conversation.item.truncate`. Pure: times are given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.modalities.talk.realtime.items import ConversationItem


@dataclass(slots=True)
class SpeechPlayback:
    """The answer that was spoken last. Times are milliseconds of the session's clock."""

    entry: ConversationItem | None = None
    response_id: str = ""
    until_ms: float = 0.0
    _pieces: list[tuple[float, float]] = field(default_factory=list)

    def add(
        self, response_id: str, entry: ConversationItem, now_ms: float, sound_ms: float
    ) -> None:
        """Note sound that was sent."""
        if entry is not self.entry:
            self.entry, self.response_id, self._pieces = entry, response_id, []
        begin_ms = max(now_ms, self.until_ms)
        self._pieces.append((begin_ms, sound_ms))
        self.until_ms = begin_ms + sound_ms

    def interrupt(self, now_ms: float) -> int | None:
        """Stop playing; returns the milliseconds that were heard if some were not."""
        if self.entry is None or now_ms >= self.until_ms:
            return None
        heard_ms = sum(min(ms, max(0.0, now_ms - begin_ms)) for begin_ms, ms in self._pieces)
        self.until_ms = now_ms
        return int(heard_ms)
