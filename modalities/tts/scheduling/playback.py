"""The playback of a stream: what has been played, and when the sound runs out.

Owns the clock of one stream. It plays from its first audio on, without a stop; audio that comes
when the buffer is dry is an underrun, and playing goes on from there. Knows nothing of how the
audio is made, or of what is done to be in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from triptych.modalities.tts.wire import SpeechRequest


@dataclass(slots=True)
class Playback:
    """One listener's clock; times and durations in seconds.

    `due_s` is when audio is needed next: the moment the buffer runs dry, or, before anything was
    given, the moment the first audio was promised. It is infinite without a listener.
    """

    due_s: float
    has_begun: bool = False
    given_s: float = 0.0
    num_underruns: int = 0
    underrun_s: float = 0.0
    _standing_s: float | None = None  # what was left in the buffer when the listener stopped

    @classmethod
    def of(cls, request: SpeechRequest, *, arrival_s: float, target_s: float) -> Self:
        """The clock of a request whose first sound is promised `target_s` after it arrived.

        A listener that has sound of an earlier request is playing already.
        """
        if not request.is_live:
            return cls(math.inf)
        if request.lead_s > 0:
            return cls(arrival_s + request.lead_s, has_begun=True)
        return cls(arrival_s + target_s)

    @property
    def is_live(self) -> bool:
        """Whether there is a listener while the audio is made."""
        return not math.isinf(self.due_s)

    def lead_s(self, now_s: float) -> float:
        """Audio left in the buffer; below 0 for how long it has been dry, infinite if not live."""
        return self.due_s - now_s

    def give(self, seconds: float, now_s: float) -> None:
        """Add audio that goes out now."""
        self.given_s += seconds
        if not self.is_live:
            self.has_begun = True
        elif self._standing_s is not None:  # it is kept until the listener goes on
            self._standing_s = seconds + (self._standing_s if self.has_begun else 0.0)
            self.has_begun = True
        elif not self.has_begun:
            self.has_begun, self.due_s = True, now_s + seconds
        else:
            if now_s > self.due_s:
                self.num_underruns += 1
                self.underrun_s += now_s - self.due_s
            self.due_s = max(self.due_s, now_s) + seconds

    def stop(self, now_s: float) -> None:
        """The listener has stopped taking audio: the buffer stays as it is."""
        if self._standing_s is None:
            self._standing_s = max(0.0, self.due_s - now_s)

    def go_on(self, now_s: float) -> None:
        """The listener takes audio again."""
        if self._standing_s is not None:
            self.due_s, self._standing_s = now_s + self._standing_s, None
