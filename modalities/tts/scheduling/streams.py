"""The life of streams: from a codec row and a first prompt to the last sample.

Owns what becomes of codes that were sampled and of sound that was decoded, the order of segments,
and the deltas that go out. Each segment is a sequence of the `TokenBatch` that samples its codes,
one after the other. Decides nothing about the order (`policy`), and knows steps only by their rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from typing import Any

import msgspec

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.sampling_params import MAX_SAMPLES
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.errors import (
    InvalidRequest,
    NonFinite,
    RequestError,
    TriptychError,
    UnsupportedOption,
)
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.modalities.tts.plan import AudioRow, AudioRowResult, VoicePrompt
from triptych.modalities.tts.scheduling.costs import SpeechCosts
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.policy import AudioPiece, SpeechPolicy, SpeechStep
from triptych.modalities.tts.scheduling.runaway import RunawayGuard
from triptych.modalities.tts.scheduling.state import (
    SpeechModel,
    SpeechState,
    SpokenSegment,
    Stream,
    segment_prompt,
)
from triptych.modalities.tts.wire import (
    SAMPLE_BYTES,
    SpeechDelta,
    SpeechFinish,
    SpeechRequest,
    SpeechSegment,
)
from triptych.schedulers.batcher import Batcher
from triptych.schedulers.cost import CostModel
from triptych.schedulers.tokens.batch import COUNTERS as TOKEN_COUNTERS
from triptych.schedulers.tokens.batch import TokenBatch

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


class SpeechStreams(Batcher[Stream, SpeechStep, Any]):
    """The life of the streams of a speech scheduler: admits, advances and ends them.

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
            options=_token_options(schedule, speech),
            max_length=max_length,
            namespace=namespace,
            counters=self._counters,
        )
        self._max_tokens = min(max_length, pool.num_pages * pool.page_size)
        self._state = SpeechState(num_slots=speech.max_streams, streams=self._jobs)
        self.costs = CostModel(alike=frozenset(("decode", "mixed", "prefill")))
        self._estimates = SpeechCosts(model.clock, self.costs)
        self._policy = SpeechPolicy(model, speech, self._state, self._tokens, self._estimates)
        self._expected_s: dict[int, float] = {}
        self._voices: OrderedDict[str, VoicePrompt] = OrderedDict()
        self._resumed: list[Stream] = []
        self._num_submitted = 0
        self._now_s = -math.inf

    def cancel(self, job_id: str) -> None:
        """End a job with a last delta that says so; an unknown or ended one is ignored."""
        super().cancel(job_id)
        self._admit(self._now_s)

    # Jobs.

    def _open(self, job: Job) -> Stream:
        request = job.request
        assert isinstance(request, SpeechRequest), "the API sends this model speech requests"
        if not request.segments:
            raise InvalidRequest("There is nothing to speak.", param="input")
        target_s = self._options.target_first_audio_s
        stream = Stream(
            job,
            job.is_paused,
            request=request,
            rank=(not request.is_live, self._num_submitted),
            playback=Playback.of(request, arrival_s=job.arrival_s, target_s=target_s),
            voice=self._find_voice(request),
        )
        self._check_size(stream)
        return stream

    def _num_queued(self) -> int:
        return len(self._state.waiting)

    def _joined(self, opened: Stream) -> None:
        self._num_submitted += 1
        self._now_s = max(self._now_s, opened.job.arrival_s)
        self._state.enqueue(opened)
        self._admit(self._now_s)

    def _paused(self, opened: Stream) -> None:
        if opened.is_paused:
            opened.playback.stop(self._now_s)
        else:
            self._resumed.append(opened)
        if opened.sampling is not None:
            self._tokens.state.set_paused(opened.sampling.row, opened.is_paused)
        self._admit(self._now_s)

    def _cancelled(self, opened: Stream) -> SpeechDelta:
        index = opened.segments[0].index if opened.segments else 0
        return self._delta(opened, segment=index, finish_reason="cancelled")

    def _left(self, opened: Stream) -> None:
        """Pages and codec row are freed once no step in flight uses them."""
        sampling = opened.sampling
        self._state.leave(opened)
        if sampling is not None and not sampling.row.is_over:
            self._tokens.close(sampling.row)
        opened.segments.clear()

    def _num_waiting(self) -> int:
        return len(self._state.waiting)

    def _fail(self, stream: Stream, error: TriptychError) -> None:
        self._end(stream, JobState.FAILED, error=error)

    def _find_voice(self, request: SpeechRequest) -> VoicePrompt | None:
        """The voice of a request; none if its clip has to be read first."""
        if request.clip is not None:
            if not self._speech.can_clone:
                raise UnsupportedOption("This model imitates no recordings.", param="voice")
            voice = self._voices.get(request.clip.digest)
            if voice is not None:
                self._voices.move_to_end(request.clip.digest)
            return voice
        if request.voice and self._speech.voices and request.voice not in self._speech.voices:
            raise InvalidRequest("This model has no such voice.", param="voice")
        return self._speech.voices.get(request.voice, VoicePrompt())

    # Beginning.

    def _admit(self, now_s: float) -> None:
        """Admit waiting streams while there are codec rows."""
        while (stream := self._state.next_stream()) is not None:
            self._state.admit(stream)
            self._begin_segment(stream, now_s)

    def _check_size(self, stream: Stream) -> None:
        """Raise `RequestError` if some segment can never be spoken."""
        for index, spec in enumerate(stream.request.segments):
            request = self._token_request(stream, index, spec, with_context=False)
            self._tokens.max_outputs(request)

    def _token_request(
        self, stream: Stream, index: int, spec: SpeechSegment, *, with_context: bool
    ) -> TokenRequest:
        request = stream.request
        num_own = len(spec.prompt_ids) + (len(stream.voice.prompt_ids) if stream.voice else 0)
        num_steps = spec.max_steps or self._max_tokens
        room = min(self._max_tokens - num_steps, self._tokens.max_prompt_tokens) - num_own
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
            priority=0 if not request.is_live else 2 if index else 1,  # what has begun goes on
            tenant=request.tenant,
        )

    def _begin_segment(self, stream: Stream, now_s: float) -> None:
        """Have the codes of the next segment sampled."""
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
        guard = RunawayGuard(
            max_tokens=request.sampling.max_tokens, tokens_per_s=1.0 / self._speech.clock.step_s
        )
        segment = SpokenSegment(index=index, spec=spec, guard=guard, row=row)
        self._tokens.add(row)
        stream.segments.append(segment)

    # Codes.

    def _take_codes(self, stream: Stream, delta: TokenDelta, now_s: float) -> None:
        """Take up what a step has sampled of a stream's last segment."""
        segment = stream.segments[-1]
        stream.job.state = JobState.RUNNING
        stream.num_cached_tokens += delta.num_cached_tokens - segment.num_cached_tokens
        segment.num_cached_tokens = delta.num_cached_tokens
        segment.end = delta.finish_reason
        for token_id in delta.token_ids:
            segment.ids.append(token_id)
            segment.codes.append(delta.codes or (token_id,))
            stream.num_output_tokens += 1
            if segment.guard.push((token_id,)) == "loop":
                self._break_off(segment)
                break
        if segment.end is not None:
            self._tokens.close(segment.row)
            self._tokens_over(stream, now_s)

    def _break_off(self, segment: SpokenSegment) -> None:
        """End a segment that repeats itself; what is not decoded yet of the repeats is dropped."""
        self._counters["speech_loops_total"] += 1
        segment.end = "loop"
        num_kept = max(segment.num_pushed, segment.guard.num_sound_tokens)
        del segment.ids[num_kept:], segment.codes[num_kept:]

    def _tokens_over(self, stream: Stream, now_s: float) -> None:
        if stream.num_started < len(stream.request.segments):
            self._begin_segment(stream, now_s)
        if not stream.is_done:
            self._skip_silent(stream, now_s)

    # Sound.

    def _begin_audio(self, piece: AudioPiece) -> AudioRow:
        """Hand a chunk to the decoder."""
        stream, segment = piece.stream, piece.stream.segments[0]
        codes = segment.codes[segment.num_pushed : segment.num_pushed + piece.num_codes]
        is_first = not segment.is_begun
        has_prompt = is_first and self._options.prepend_prompt_speech_tokens != "never"
        segment.num_pushed += piece.num_codes
        segment.is_begun = True
        if not segment.num_repeated:
            stream.num_chunks += 1
            stream.chunk_frames = piece.num_frames
        return AudioRow(
            job_id=stream.job.job_id,
            slot=stream.slot,
            codes=tuple(codes),
            is_first=is_first,
            is_last=piece.is_last,
            seed=stream.request.sampling.seed,
            prompt=stream.voice.codes if has_prompt and stream.voice is not None else (),
        )

    def _take_audio(self, piece: AudioPiece, result: AudioRowResult, now_s: float) -> None:
        """Send what a chunk became."""
        stream = piece.stream
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
        if piece.is_last:
            self._finish_segment(stream, pcm, now_s)
        elif pcm:
            self._give(stream, pcm, now_s)
            self._send(stream, self._delta(stream, segment=segment.index, pcm=pcm))
        if not stream.is_done:
            self._skip_silent(stream, now_s)

    def _decode_again(self, stream: Stream) -> None:
        """Begin a segment's sound again: its codes are all here, what was given out is left out."""
        segment = stream.segments[0]
        segment.num_pushed, segment.is_begun = 0, False
        segment.num_repeated = segment.num_given
        stream.decoder.is_alone = True

    def _skip_silent(self, stream: Stream, now_s: float) -> None:
        """Finish segments at the head of which nothing is left to decode."""
        while stream.segments and not stream.is_decoding:
            segment, clock = stream.segments[0], self._speech.clock
            num_left = clock.num_frames(len(segment.codes)) - clock.num_frames(segment.num_pushed)
            is_held_back = segment.is_begun and clock.lookahead_frames > 0
            if segment.end is None or num_left or is_held_back:
                return
            self._finish_segment(stream, b"", now_s)

    def _finish_segment(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        segment = stream.segments.popleft()
        assert segment.end is not None, "a segment is over when its codes are"
        num_silent = round(segment.spec.pause_s * self._speech.sample_rate)
        pcm += bytes(num_silent * SAMPLE_BYTES)
        stream.worst_end = max(stream.worst_end, segment.end, key=_SEVERITY.index)
        is_final = segment.index + 1 == len(stream.request.segments)
        self._give(stream, pcm, now_s)
        delta = self._delta(
            stream,
            segment=segment.index,
            pcm=pcm,
            segment_finish=segment.end,
            finish_reason=stream.worst_end if is_final else None,
        )
        if is_final:
            self._end(stream, JobState.FINISHED, payload=delta)
        else:
            self._send(stream, delta)

    def _give(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        """Keep the listener's clock."""
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

    def _delta(
        self,
        stream: Stream,
        *,
        segment: int,
        pcm: bytes = b"",
        segment_finish: SpeechFinish | None = None,
        finish_reason: SpeechFinish | None = None,
    ) -> SpeechDelta:
        return SpeechDelta(
            segment=segment,
            pcm=pcm,
            segment_finish=segment_finish,
            finish_reason=finish_reason,
            num_prompt_tokens=stream.num_prompt_tokens,
            num_cached_tokens=stream.num_cached_tokens,
            num_output_tokens=stream.num_output_tokens,
        )


def _token_options(schedule: ScheduleOptions, speech: SpeechOptions) -> ScheduleOptions:
    """Options of the token steps.

    A row that speaks has all the pages it may need and never gives way; streams that have begun
    go before those that wait, and live streams before those without a listener.
    """
    num_rows = min(schedule.max_batch_size, speech.max_queue_size_tg or schedule.max_batch_size)
    return dataclasses.replace(
        schedule, max_batch_size=num_rows, max_preemptions=0, schedule_policy="priority"
    )
