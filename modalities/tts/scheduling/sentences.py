"""When sentences are due, for models that make a sentence in stages.

Owns a request's units and deadlines for `schedulers.staged`. Knows nothing of the order among jobs.
"""

from __future__ import annotations

import math

import msgspec

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.wire import SAMPLE_BYTES, SpeechDelta, SpeechRequest
from triptych.schedulers.staged import JobPace


class SpeechPace(JobPace):
    """Speech in sentences, each due when the playback of those before it ends.

    The first is due `target_s` after the request arrived. A request that is not live is due never.
    With a `max_lead_s` above 0 nothing is made further ahead of a listener than that.
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
        """One per segment."""
        return len(self._request.segments)

    def first_stage(self, unit: int) -> Stage:
        """Every segment begins with its prompt."""
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
        """Note its sound; fills in the counts of the whole job so far."""
        if payload.pcm:
            self._playback.give(len(payload.pcm) / SAMPLE_BYTES / self._sample_rate, now_s)
        self._num_steps += payload.num_output_tokens
        spoken = self._request.segments[: payload.segment + 1]
        return msgspec.structs.replace(
            payload,
            num_prompt_tokens=sum(len(segment.prompt_ids) for segment in spoken),
            num_output_tokens=self._num_steps,
        )

    def cancelled(self) -> SpeechDelta:
        """A delta that says so."""
        return SpeechDelta(finish_reason="cancelled", num_output_tokens=self._num_steps)
