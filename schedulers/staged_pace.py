"""When the next piece of a job's answer is due, for jobs whose work is done stage by stage.

Owns what the staged scheduler asks of a request: how many units it is, and by when its listener
or reader needs more. Knows nothing of the order among jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from triptych.core.embedding import EmbedDelta
from triptych.core.speech import SpeechDelta, SpeechRequest
from triptych.core.staged_plan import Stage
from triptych.schedulers.playback import Playback

_SAMPLE_BYTES = 4


class JobPace(Protocol):
    """One job's size and deadlines. Made from its request when it is submitted."""

    @property
    def num_units(self) -> int:
        """How many units the job is; at least one."""
        ...

    def first_stage(self, unit: int) -> Stage:
        """The stage that a unit begins with."""
        ...

    def due_s(self) -> float:
        """By when the unit after those sent must be over; infinity where nobody waits for it."""
        ...

    def not_before_s(self) -> float:
        """When it is early enough to go on; 0 for at once."""
        ...

    def send(self, payload: Any, now_s: float) -> Any:
        """Note that `payload` goes out now; returns it with the job's running counts filled in."""
        ...

    def cancelled(self) -> Any:
        """The last payload of a job that was cancelled; `None` for none."""
        ...


class TargetPace:
    """A job that is one unit, due a while after it arrived."""

    num_units = 1

    def __init__(self, first_stage: Stage, due_s: float = math.inf, cancelled: Any = None) -> None:
        self._first_stage = first_stage
        self._due_s = due_s
        self._cancelled = cancelled

    def first_stage(self, unit: int) -> Stage:
        """The stage that the job begins with."""
        return self._first_stage

    def due_s(self) -> float:
        """The same all the time."""
        return self._due_s

    def not_before_s(self) -> float:
        """At once."""
        return 0.0

    def send(self, payload: Any, now_s: float) -> Any:
        """The payload as it is."""
        return payload

    def cancelled(self) -> Any:
        """What the job was given for this end."""
        return self._cancelled


class BatchPace:
    """Texts that nobody reads before all of them are done: as many units, of one stage each."""

    def __init__(self, stage: str, sizes: Sequence[int]) -> None:
        self._stage = stage
        self._sizes = sizes

    @property
    def num_units(self) -> int:
        """One per text."""
        return len(self._sizes)

    def first_stage(self, unit: int) -> Stage:
        """The only one."""
        return Stage(self._stage, self._sizes[unit])

    def due_s(self) -> float:
        """Never."""
        return math.inf

    def not_before_s(self) -> float:
        """At once."""
        return 0.0

    def send(self, payload: EmbedDelta, now_s: float) -> EmbedDelta:
        """The payload; the last says that it is."""
        is_last = payload.text == len(self._sizes) - 1
        return msgspec.structs.replace(payload, finish_reason="stop") if is_last else payload

    def cancelled(self) -> EmbedDelta:
        """A delta that says so."""
        return EmbedDelta(finish_reason="cancelled")


class SpeechPace:
    """Speech in sentences, each due when the listener has heard those before it.

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
        return Stage("begin", len(self._request.segments[unit].prompt_ids))

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
            self._playback.give(len(payload.pcm) / _SAMPLE_BYTES / self._sample_rate, now_s)
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
