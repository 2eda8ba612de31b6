"""Speech that stays ahead of its listeners: token steps and audio steps of one model.

Owns the life of streams, from a codec row and a first prompt to the last sample, and the deltas
that are sent. Each segment is a sequence of the `TokenBatch` that samples its codes, one after the
other. Decides nothing about the order of steps and rows (`policy`). Knows no tensors.

A segment's codes are sampled while those before it are still being decoded. A stream has at most
one audio step in flight, so that a decoder that failed can restart its segment: the segment's codes
are kept, and samples that were sent before are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.engine_api.sampling_params import MAX_SAMPLES
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import (
    InvalidRequest,
    NonFinite,
    RequestError,
    TriptychError,
)
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.modalities.tts.plan import AudioPlan, AudioRowResult, VoicePlan, VoicePrompt
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.policy import (
    AudioChunk,
    ClipEncoding,
    SpeechCosts,
    SpeechPolicy,
    SpeechStep,
)
from triptych.modalities.tts.scheduling.state import (
    LoopDetector,
    SpeechModel,
    SpeechState,
    SpokenSegment,
    Stream,
    segment_prompt,
    token_options,
)
from triptych.modalities.tts.scheduling.voices import RequestVoices
from triptych.modalities.tts.wire import (
    SAMPLE_BYTES,
    SpeechDelta,
    SpeechFinish,
    SpeechRequest,
    SpeechSegment,
)
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.batcher import Batcher
from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.batch import COUNTERS as TOKEN_COUNTERS
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.scheduled_row import ScheduledRow

_COUNTERS = (
    "speech_frames_total",
    "speech_audio_seconds_total",
    "speech_underruns_total",
    "speech_underrun_seconds_total",
    "speech_late_starts_total",
    "speech_loops_total",
    "speech_non_finite_total",
)
_SEVERITY: tuple[SpeechFinish, ...] = ("stop", "length", "loop")
_LEAST_LOOP_S = 3.0  # shorter repetitions are no loops


class SpeechScheduler(Batcher[Stream, SpeechStep, Any]):
    """Schedules the `SpeechRequest` jobs of one speech-token model.

    `max_length` bounds prompt and codes of a segment; `namespace` is the digest of the weights.
    """

    def __init__(
        self,
        *,
        model: SpeechModel,
        pool: PagePool,
        schedule: ScheduleOptions,
        speech: SpeechOptions,
        max_length: int,
        namespace: bytes,
    ) -> None:
        super().__init__(
            model=model.name,
            max_jobs=schedule.max_queue_size,
            counters=(*TOKEN_COUNTERS, *_COUNTERS),
        )
        self._speech = model
        self._options = speech
        self._tokens = TokenBatch(
            pool=pool,
            options=token_options(schedule, speech),
            max_length=max_length,
            namespace=namespace,
            counters=self._counters,
        )
        self._max_tokens = min(max_length, pool.num_pages * pool.page_size)
        self._state = SpeechState(num_slots=speech.max_streams, streams=self._jobs)
        self.costs = CostModel(same_kinds=frozenset(("decode", "mixed", "prefill")))
        self._estimates = SpeechCosts(model.clock, self.costs)
        self._policy = SpeechPolicy(model, speech, self._state, self._tokens, self._estimates)
        self._expected_s: dict[int, float] = {}
        self._voices = RequestVoices(model)
        self._resumed: list[Stream] = []
        self._num_submitted = 0
        self._now_s = -math.inf

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta of reason "cancelled"; unknown ids are ignored."""
        super().cancel(job_id)
        self._admit(self._now_s)

    # Jobs.

    def _open(self, job: Job) -> Stream:
        request = job.request
        assert isinstance(request, SpeechRequest), "the API sends this model speech requests"
        if not request.segments:
            raise InvalidRequest("The input has nothing to speak.", param="input")
        target_s = self._options.target_first_audio_s
        stream = Stream(
            job,
            job.is_paused,
            request=request,
            rank=(not request.is_live, self._num_submitted),
            playback=Playback.of(request, arrival_s=job.arrival_s, target_s=target_s),
            voice=self._voices.find(request),
        )
        self._check_size(stream)
        return stream

    def _num_queued(self) -> int:
        return len(self._state.waiting)

    def _on_submit(self, opened: Stream) -> None:
        self._num_submitted += 1
        self._now_s = max(self._now_s, opened.job.arrival_s)
        self._state.enqueue(opened)
        self._admit(self._now_s)

    def _on_pause(self, opened: Stream) -> None:
        if opened.is_paused:
            opened.playback.stop(self._now_s)
        else:
            self._resumed.append(opened)
        if opened.sampling is not None:
            self._tokens.state.set_paused(opened.sampling.row, opened.is_paused)
        self._admit(self._now_s)

    def _cancel_payload(self, opened: Stream) -> SpeechDelta:
        index = opened.segments[0].index if opened.segments else 0
        return opened.delta(segment=index, finish_reason="cancelled")

    def _counts_of(self, opened: Stream) -> Mapping[str, int]:
        return opened.counts

    def _on_end(self, opened: Stream) -> None:
        """Release pages and the codec row once no step in flight uses them."""
        sampling = opened.sampling
        self._state.leave(opened)
        if sampling is not None and not sampling.row.is_over:
            self._tokens.close(sampling.row)
        opened.segments.clear()

    def _num_waiting(self) -> int:
        return len(self._state.waiting)

    def _fail(self, stream: Stream, error: TriptychError) -> None:
        self._end(stream, JobState.FAILED, error=error)

    # Starting.

    def _admit(self, now_s: float) -> None:
        """Admit waiting streams while there are codec rows."""
        while (stream := self._state.next_stream()) is not None:
            self._state.admit(stream)
            self._begin_segment(stream, now_s)

    def _check_size(self, stream: Stream) -> None:
        """Raise `RequestError` if some segment can never be spoken."""
        for index, spec in enumerate(stream.request.segments):
            request = self._token_request(stream, index, spec, with_context=False)
            self._tokens.sizes.max_outputs(request)

    def _token_request(
        self, stream: Stream, index: int, spec: SpeechSegment, *, with_context: bool
    ) -> TokenRequest:
        request = stream.request
        voice = stream.voice or VoicePrompt()
        num_own = len(voice.prompt_ids) + len(spec.prompt_ids) + len(voice.suffix_ids)
        num_steps = spec.max_steps or self._max_tokens
        room = min(self._max_tokens - num_steps, self._tokens.sizes.max_prompt_tokens) - num_own
        prompt_ids, frames = segment_prompt(self._speech, stream, spec, room if with_context else 0)
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=num_steps,
            stop_token_ids=(*request.sampling.stop_token_ids, *self._speech.stop_ids),
            sample_index=request.sampling.sample_index + index * MAX_SAMPLES,
        )
        return TokenRequest(
            prompt_ids=prompt_ids,
            prompt_frames=frames,
            sampling=sampling,
            priority=0 if not request.is_live else 2 if index else 1,  # begun before new
            tenant=request.tenant,
        )

    def _begin_segment(self, stream: Stream, now_s: float) -> None:
        """Start sampling the codes of the next segment."""
        job, index = stream.job, stream.num_started
        spec = stream.request.segments[index]
        request = self._token_request(stream, index, spec, with_context=True)
        stream.num_started += 1
        stream.num_prompt_tokens += len(request.prompt_ids)
        name = f"{job.job_id}#{index}"
        try:
            row = self._tokens.open(name, job, request, arrival_s=now_s)
        except RequestError as error:
            self._fail(stream, error)
            return
        least_tokens = max(2, math.ceil(_LEAST_LOOP_S * (1.0 / self._speech.clock.step_s)))
        loops = LoopDetector(least_tokens=least_tokens)
        segment = SpokenSegment(
            index=index,
            spec=spec,
            loops=loops,
            row=row,
            ids_per_step=self._speech.ids_per_step,
        )
        self._tokens.add(row)
        stream.segments.append(segment)

    # Codes.

    def _take_codes(self, stream: Stream, delta: TokenDelta, now_s: float) -> None:
        """Add sampled codes to a stream's last segment."""
        segment = stream.segments[-1]
        stream.job.state = JobState.RUNNING
        stream.num_cached_tokens += delta.num_cached_tokens - segment.num_cached_tokens
        segment.num_cached_tokens = delta.num_cached_tokens
        segment.end = delta.finish_reason
        for token_id in delta.token_ids:
            stream.num_output_tokens += 1
            if segment.push_code(token_id, delta.codes or (token_id,), delta.place):
                self._counters["speech_loops_total"] += 1
                break
        if segment.end is not None:
            self._tokens.close(segment.row)
            if stream.num_started < len(stream.request.segments):
                self._begin_segment(stream, now_s)
            if not stream.is_done:
                self._skip_silent(stream, now_s)

    # Sound.

    def _take_audio(self, chunk: AudioChunk, result: AudioRowResult, now_s: float) -> None:
        """Send the decoded sound of a chunk."""
        stream = chunk.stream
        stream.decoder.is_alone = False
        if not result.is_finite:
            self._counters["speech_non_finite_total"] += 1
            error = NonFinite("The decoder computed no finite samples for this request.")
            self._fail(stream, error)
            return
        segment = stream.segments[0]
        num_old = min(segment.num_repeated, result.num_samples)
        segment.num_repeated -= num_old
        segment.num_given += result.num_samples - num_old
        pcm = result.pcm[num_old * SAMPLE_BYTES :]
        if chunk.is_last:
            self._finish_segment(stream, pcm, now_s)
        elif pcm:
            self._give(stream, pcm, now_s)
            ends_s = self._new_ends_s(segment)
            self._send(stream, stream.delta(segment=segment.index, pcm=pcm, id_ends_s=ends_s))
        if not stream.is_done:
            self._skip_silent(stream, now_s)

    def _skip_silent(self, stream: Stream, now_s: float) -> None:
        """Finish leading segments that have nothing left to decode."""
        while stream.segments and not stream.is_decoding:
            segment, clock = stream.segments[0], self._speech.clock
            num_left = clock.num_frames(len(segment.codes)) - clock.num_frames(segment.num_pushed)
            is_held_back = segment.is_begun and clock.lookahead_frames > 0
            if segment.end is None or num_left or is_held_back:
                return
            self._finish_segment(stream, b"", now_s)

    def _finish_segment(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        segment = stream.segments.popleft()
        assert segment.end is not None, "a finished segment has all its codes"
        num_silent = round(segment.spec.pause_s * self._speech.sample_rate)
        pcm += bytes(num_silent * SAMPLE_BYTES)
        stream.worst_end = max(stream.worst_end, segment.end, key=_SEVERITY.index)
        is_final = segment.index + 1 == len(stream.request.segments)
        self._give(stream, pcm, now_s)
        delta = stream.delta(
            segment=segment.index,
            pcm=pcm,
            id_ends_s=self._new_ends_s(segment),
            segment_finish=segment.end,
            finish_reason=stream.worst_end if is_final else None,
        )
        if is_final:
            self._end(stream, JobState.FINISHED, payload=delta)
        else:
            self._send(stream, delta)

    def _new_ends_s(self, segment: SpokenSegment) -> tuple[float, ...]:
        return tuple(step * self._speech.clock.step_s for step in segment.new_ends())

    def _give(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        """Advance the listener's clock by sound that is sent now."""
        if not pcm:
            return
        playback, counters = stream.playback, self._counters
        if not playback.has_begun:
            stream.job.timings["first_audio_s"] = now_s
            counters["speech_late_starts_total"] += now_s > playback.due_s
        num_underruns, underrun_s = playback.num_underruns, playback.underrun_s
        seconds = len(pcm) / SAMPLE_BYTES / self._speech.sample_rate
        playback.give(seconds, now_s)
        counters["speech_audio_seconds_total"] += seconds
        counters["speech_underruns_total"] += playback.num_underruns - num_underruns
        counters["speech_underrun_seconds_total"] += playback.underrun_s - underrun_s

    # The scheduler protocol.

    def commit(self, plan: Plan, result: StepResult, now_s: float) -> None:
        """Record the result of a step, and send its sound."""
        self._advance(now_s)
        expected_s = self._expected_s.pop(plan.step_id)
        if not isinstance(plan, VoicePlan):
            self._estimates.observe_wait(now_s - expected_s)
        super().commit(plan, result, now_s)

    def fail(self, plan: Plan, error: TriptychError, now_s: float) -> None:
        """End the jobs of a step that raised.

        If it ran out of memory, token rows are retried in two halves, and audio decoders restart
        their segments, each in a step of its own.
        """
        self._advance(now_s)
        del self._expected_s[plan.step_id]
        super().fail(plan, error, now_s)

    def stats(self) -> SchedulerStats:
        """Counts for metrics: streams, their listeners' buffers, pages and totals."""
        return self._tokens.with_pool_counters(super().stats())

    def check(self) -> None:
        """Assert that every page, codec row and stream is accounted for."""
        self._tokens.check(self._rows_in_flight())
        self._state.check()
        sampling = {stream.sampling.row for stream in self._state.speaking if stream.sampling}
        assert sampling == self._tokens.state.rows, "a sequence is lost"
        decoded = [row.stream for row in self._rows_in_flight() if isinstance(row, AudioChunk)]
        assert len(set(decoded)) == len(decoded), "a decoder is in two steps"
        holders = (*self._state.speaking, *self._state.leaving)
        assert {stream for stream in holders if stream.is_decoding} == set(decoded)

    def _gauges(self) -> dict[str, float]:
        return {**self._tokens.gauges(), **self._state.gauges(self._now_s)}

    # Proposing and booking.

    def _choose_step(self, now_s: float) -> SpeechStep | None:
        return self._policy.choose_step(now_s)

    def _book_step(
        self, step: SpeechStep, step_id: int, now_s: float
    ) -> tuple[Plan, Sequence[Any]]:
        expected_s = self._expected_s[step_id] = now_s + step.expected_s
        is_late = step.due_s < expected_s
        if is_late and not self._resumed:  # it waited for its turn, not for its listener
            self._estimates.observe_wait(now_s - self._now_s)
        self._advance(now_s)
        plan: Plan
        if step.tokens is not None:
            plan = self._tokens.take(step.tokens, self._model, step_id)
        elif step.kind == "audio":
            has_prompt = self._options.prepend_prompt_speech_tokens != "never"
            rows = tuple(
                chunk.stream.push_chunk(
                    chunk.num_codes, chunk.num_frames, is_last=chunk.is_last, has_prompt=has_prompt
                )
                for chunk in step.rows
            )
            plan = AudioPlan(step_id=step_id, model=self._model, kind="audio", rows=rows)
        else:
            clip = step.rows[0].clip
            self._state.encoding.add(clip.digest)
            plan = VoicePlan(step_id=step_id, model=self._model, kind="voice", clip=clip)
        return plan, step.rows

    # Recording.

    def _advance(self, now_s: float) -> None:
        """Set the time of a change; streams resumed since the last one play on from here."""
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

    def _parts_of(self, step: SpeechStep) -> Iterator[tuple[Job, str]]:
        for row in step.rows:
            if isinstance(row, ScheduledRow):
                yield row.unit.job, row.stage
            elif isinstance(row, AudioChunk):
                yield row.stream.job, step.kind
            else:
                waiting = self._state.voiceless(row.clip.digest)
                yield from ((stream.job, step.kind) for stream in waiting)

    def _is_void(self, row: Any) -> bool:
        if isinstance(row, AudioChunk):
            return row.stream.is_done
        return isinstance(row, ScheduledRow) and (row.is_stale or row.unit.is_over)

    def _accept(self, step: SpeechStep, row: Any, found: Any, now_s: float) -> None:
        if isinstance(row, AudioChunk):
            self._take_audio(row, found, now_s)
        elif isinstance(row, ClipEncoding):
            self._take_voice(row.clip.digest, found)
        else:
            delta = self._tokens.accept(row, found, now_s)
            if isinstance(delta, NonFinite):
                self._fail(self._stream_of(row), delta)
            elif delta is not None:
                self._take_codes(self._stream_of(row), delta, now_s)

    def _take_voice(self, digest: str, prompt: VoicePrompt) -> None:
        self._voices.keep(digest, prompt)
        for stream in self._state.voiceless(digest):
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
            for chunk in live:
                chunk.stream.restart_decoder()
        return True

    def _fail_row(self, row: Any, error: TriptychError) -> None:
        if isinstance(row, ClipEncoding):
            for stream in self._state.voiceless(row.clip.digest):
                self._fail(stream, error)
        else:
            self._fail(self._stream_of(row), error)

    def _stream_of(self, row: AudioChunk | ScheduledRow) -> Stream:
        """The stream of a row that is not void."""
        return row.stream if isinstance(row, AudioChunk) else self._jobs[row.unit.job.job_id]

    def _settle(self, row: Any) -> None:
        if isinstance(row, AudioChunk):
            self._state.settle(row.stream)
        elif isinstance(row, ClipEncoding):
            self._state.encoding.discard(row.clip.digest)
        else:
            self._tokens.settle(row)

    def _on_step_end(self, now_s: float) -> None:
        self._admit(now_s)
