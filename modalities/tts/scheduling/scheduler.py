"""Speech that keeps ahead of its listeners: token steps and audio steps of one model.

Owns the steps of a speech-token model: which kind is next, and what is booked and committed. Which
rows a step has is the policy of `policy`, what becomes of them the business of `streams`. Knows no
tensors.

A segment's codes are sampled while those before it are still being decoded. A stream has one audio
step in flight at most, so that a decoder that failed can begin its segment again: its codes are all
here, and what it gives a second time is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import NonFinite, RequestError, TriptychError
from triptych.modalities.tts.plan import AudioPlan, VoicePlan, VoicePrompt
from triptych.modalities.tts.scheduling.policy import AudioPiece, SpeechStep, VoiceReading
from triptych.modalities.tts.scheduling.state import Stream
from triptych.modalities.tts.scheduling.streams import SpeechStreams
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.tokens.state import ScheduledRow

_MAX_VOICES = 64  # voices of clips that are remembered
_BOUNDS_S = MappingProxyType({"100ms": 0.1, "300ms": 0.3, "1s": 1.0, "3s": 3.0, "10s": 10.0})


class SpeechScheduler(SpeechStreams):
    """Schedules the `SpeechRequest` jobs of one speech-token model."""

    # What the loop asks.

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record what a step yielded, and send what sound came of it."""
        self._move_on(now_s)
        expected_s = self._expected_s.pop(plan.step_id)
        if not isinstance(plan, VoicePlan):
            self._estimates.observe_wait(now_s - expected_s)
        super().commit(plan, result, now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        Where it ran out of memory, token rows are tried again by halves, and decoders of audio
        begin their segments again, each by itself.
        """
        self._move_on(now_s)
        del self._expected_s[plan.step_id]
        super().fail(plan, error, now_s)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: voices, what their listeners have left, and totals."""
        return self._tokens.with_pool_counters(super().stats())

    def check(self) -> None:
        """Assert that every page, codec row and stream is accounted for."""
        self._tokens.check(self._rows_in_flight())
        self._state.check()
        sampling = {stream.sampling.row for stream in self._state.speaking if stream.sampling}
        assert sampling == self._tokens.state.rows, "a sequence is lost"
        decoded = [row.stream for row in self._rows_in_flight() if isinstance(row, AudioPiece)]
        assert len(set(decoded)) == len(decoded), "a decoder is in two steps"
        holders = (*self._state.speaking, *self._state.leaving)
        assert {stream for stream in holders if stream.is_decoding} == set(decoded)

    def _gauges(self) -> dict[str, float]:
        speaking = self._state.speaking
        live = [stream.playback for stream in speaking if stream.playback.is_live]
        leads_s = [playback.lead_s(self._now_s) for playback in live if playback.has_begun]
        below = {
            f"speech_streams_buffered_below_{name}": sum(lead_s < bound_s for lead_s in leads_s)
            for name, bound_s in _BOUNDS_S.items()
        }
        return {
            **self._tokens.gauges(),
            "speech_streams": len(speaking),
            "speech_streams_live": len(live),
            "speech_streams_dry": sum(lead_s < 0 for lead_s in leads_s),
            **below,
        }

    # Proposing and booking.

    def _choose_step(self, now_s: float) -> SpeechStep | None:
        return self._policy.choose_step(now_s)

    def _take(self, step: SpeechStep, step_id: int, now_s: float) -> tuple[Plan, Sequence[Any]]:
        expected_s = self._expected_s[step_id] = now_s + step.expected_s
        is_late = step.due_s < expected_s
        if is_late and not self._resumed:  # so long it waited for its turn, not for its listener
            self._estimates.observe_wait(now_s - self._now_s)
        self._move_on(now_s)
        plan: Plan
        if step.tokens is not None:
            plan = self._tokens.take(step.tokens, self._model, step_id)
        elif step.kind == "audio":
            rows = tuple(self._begin_audio(piece) for piece in step.rows)
            plan = AudioPlan(step_id=step_id, model=self._model, kind="audio", rows=rows)
        else:
            clip = step.rows[0].clip
            self._state.reading.add(clip.digest)
            plan = VoicePlan(step_id=step_id, model=self._model, kind="voice", clip=clip)
        return plan, step.rows

    # Recording.

    def _move_on(self, now_s: float) -> None:
        """Something changes, at this moment."""
        self._version += 1
        self._now_s = max(self._now_s, now_s)
        for stream in self._resumed:
            if not stream.is_paused:
                stream.playback.go_on(now_s)
        self._resumed.clear()

    def _learn(self, step: SpeechStep, kind: str, result: StepResult) -> None:
        super()._learn(step, kind, result)
        self._estimates.forget_rounds()
        if kind == "audio":
            self._counters["speech_frames_total"] += sum(row.num_frames for row in step.rows)

    def _is_void(self, row: Any) -> bool:
        if isinstance(row, AudioPiece):
            return row.stream.is_done
        return isinstance(row, ScheduledRow) and (row.is_stale or row.unit.is_over)

    def _accept(self, step: SpeechStep, row: Any, found: Any, now_s: float) -> None:
        if isinstance(row, AudioPiece):
            self._take_audio(row, found, now_s)
        elif isinstance(row, VoiceReading):
            self._take_voice(row.clip.digest, found)
        else:
            delta = self._tokens.accept(row, found, now_s)
            if isinstance(delta, NonFinite):
                self._fail(self._stream_of(row), delta)
            elif delta is not None:
                self._take_codes(self._stream_of(row), delta, now_s)

    def _take_voice(self, digest: str, prompt: VoicePrompt) -> None:
        self._voices[digest] = prompt
        if len(self._voices) > _MAX_VOICES:
            self._voices.popitem(last=False)
        for stream in self._state.readers(digest):
            stream.voice = prompt
            try:
                self._check_size(stream)
            except RequestError as error:
                self._fail(stream, error)

    def _retry(self, step: SpeechStep, live: list[Any], later: Iterable[Any]) -> bool:
        if step.tokens is not None:
            if step.tokens.is_retry:
                return False
            self._tokens.retry(live, later)
        else:
            for piece in live:
                self._decode_again(piece.stream)
        return True

    def _give_up(self, row: Any, error: TriptychError) -> None:
        if isinstance(row, VoiceReading):
            for stream in self._state.readers(row.clip.digest):
                self._fail(stream, error)
        else:
            self._fail(self._stream_of(row), error)

    def _stream_of(self, row: AudioPiece | ScheduledRow) -> Stream:
        """The stream of a row that is not void."""
        return row.stream if isinstance(row, AudioPiece) else self._jobs[row.unit.job.job_id]

    def _settle(self, row: Any) -> None:
        if isinstance(row, AudioPiece):
            self._state.settle(row.stream)
        elif isinstance(row, VoiceReading):
            self._state.reading.discard(row.clip.digest)
        else:
            self._tokens.settle(row.unit)

    def _committed(self, now_s: float) -> None:
        self._admit(now_s)
