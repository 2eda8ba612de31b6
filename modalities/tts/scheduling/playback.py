"""A listener's clock, and the deadlines that follow from it.

Owns what has been played of a stream and when its buffer runs dry, and the deadlines of models that
generate a sentence in stages (`schedulers.staged`). Playback starts with the first audio and does
not stop; audio that arrives at a dry buffer is an underrun, and playback continues from there.
Knows nothing of how audio is made or of the order among jobs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import msgspec

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.tts.wire import SAMPLE_BYTES, SpeechDelta, SpeechRequest
from triptych.schedulers.staged import JobPace


@dataclass(slots=True)
class Playback:
    """One listener's clock; times and durations in seconds.

    `due_s` is when audio is needed next: the moment the buffer runs dry, or, before any audio was
    given, the moment the first audio was promised. It is infinite without a listener.
    """

    due_s: float
    has_begun: bool = False
    given_s: float = 0.0
    num_underruns: int = 0
    underrun_s: float = 0.0
    _paused_lead_s: float | None = None  # what was left in the buffer when the listener stopped

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
        """Audio left in the buffer; negative while it is dry, infinite if not live."""
        return self.due_s - now_s

    def give(self, seconds: float, now_s: float) -> None:
        """Add audio that is sent now."""
        self.given_s += seconds
        if not self.is_live:
            self.has_begun = True
        elif self._paused_lead_s is not None:  # it is kept until the listener resumes
            self._paused_lead_s = seconds + (self._paused_lead_s if self.has_begun else 0.0)
            self.has_begun = True
        elif not self.has_begun:
            self.has_begun, self.due_s = True, now_s + seconds
        else:
            if now_s > self.due_s:
                self.num_underruns += 1
                self.underrun_s += now_s - self.due_s
            self.due_s = max(self.due_s, now_s) + seconds

    def stop(self, now_s: float) -> None:
        """Freeze the buffer: the listener has stopped taking audio."""
        if self._paused_lead_s is None:
            self._paused_lead_s = max(0.0, self.due_s - now_s)

    def go_on(self, now_s: float) -> None:
        """Resume playback: the listener takes audio again."""
        if self._paused_lead_s is not None:
            self.due_s, self._paused_lead_s = now_s + self._paused_lead_s, None


class SpeechPace(JobPace):
    """Speech in sentences, each due when the playback of those before it ends.

    The first is due `target_s` after the request arrived; a request that is not live is never due.
    With a `max_lead_s` above 0 no sentence is generated further ahead of its listener than that.
    """

    def __init__(
        self,
        request: SpeechRequest,
        *,
        arrival_s: float,
        target_s: float,
        sample_rate: int,
        max_lead_s: float = 0.0,
    ) -> None:
        super().__init__(Stage("begin", 0))
        self._request = request
        self._sample_rate = sample_rate
        self._max_lead_s = max_lead_s or math.inf
        self._playback = Playback.of(request, arrival_s=arrival_s, target_s=target_s)
        self._num_steps = 0

    @property
    def num_units(self) -> int:
        """The number of segments."""
        return len(self._request.segments)

    def first_stage(self, unit: int) -> Stage:
        """The first stage, sized by the segment's prompt."""
        return Stage(self._first_stage.name, len(self._request.segments[unit].prompt_ids))

    def due_s(self) -> float:
        """When the listener's buffer runs dry."""
        return self._playback.due_s

    def not_before_s(self) -> float:
        """When the listener's buffer is down to the greatest lead."""
        playback = self._playback
        is_playing = playback.is_live and playback.has_begun
        return max(0.0, playback.due_s - self._max_lead_s) if is_playing else 0.0

    def send(self, payload: SpeechDelta, now_s: float) -> SpeechDelta:
        """Record the payload's sound; returns it with the counts of the whole job so far."""
        if payload.pcm:
            self._playback.give(len(payload.pcm) / SAMPLE_BYTES / self._sample_rate, now_s)
        self._num_steps += payload.num_output_tokens
        spoken = self._request.segments[: payload.segment + 1]
        return msgspec.structs.replace(
            payload,
            num_prompt_tokens=sum(len(segment.prompt_ids) for segment in spoken),
            num_output_tokens=self._num_steps,
        )

    def cancel_payload(self) -> SpeechDelta:
        """The last delta of a cancel_payload job."""
        return SpeechDelta(finish_reason="cancelled", num_output_tokens=self._num_steps)
