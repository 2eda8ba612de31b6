"""The life of streams: from a codec row and a first prompt to the last sample.

Owns what becomes of codes that were drawn and of sound that was decoded, the order of segments,
and the deltas that go out. Decides nothing about who runs when (`speech_draft`), and knows steps
only by the rows they had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from triptych.core.config import SpeechOptions
from triptych.core.errors import ErrorInfo, NonFinite, OutOfMemory, TriptychError, to_info
from triptych.core.job import Job, JobState, Output
from triptych.core.plan import StepCodes
from triptych.core.sampling_params import MAX_SAMPLES
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.modalities.tts.plan import SAMPLE_BYTES, AudioRow, AudioRowResult
from triptych.modalities.tts.scheduling.draft import AudioPiece
from triptych.modalities.tts.scheduling.runaway import RunawayGuard
from triptych.modalities.tts.scheduling.state import (
    SpeechModel,
    SpeechState,
    SpokenSegment,
    Stream,
    segment_prompt,
)
from triptych.modalities.tts.wire import SpeechDelta, SpeechFinish, SpeechSegment
from triptych.schedulers.token import TokenScheduler

_SEVERITY: tuple[SpeechFinish, ...] = ("stop", "length", "loop")


@dataclass(slots=True)
class SpeechCounters:
    """Totals since the model was loaded."""

    num_frames: int = 0
    audio_s: float = 0.0
    num_underruns: int = 0
    underrun_s: float = 0.0
    num_late_starts: int = 0
    num_loops: int = 0
    num_non_finite: int = 0


class SpeechStreams:
    """Moves streams on. `max_tokens` bounds prompt and codes of a segment."""

    def __init__(
        self,
        model: SpeechModel,
        options: SpeechOptions,
        state: SpeechState,
        tokens: TokenScheduler,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._options = options
        self._state = state
        self._tokens = tokens
        self._max_tokens = max_tokens
        self._heard: deque[tuple[Stream, SpokenSegment, Output[TokenDelta]]] = deque()
        self.counters = SpeechCounters()

    # Beginning.

    def let_in(self, now_s: float) -> None:
        """Let waiting streams speak while there are codec rows."""
        while (stream := self._state.next_stream()) is not None:
            self._state.admit(stream)
            self._begin_segment(stream, now_s)

    def check_size(self, stream: Stream) -> None:
        """Raise `RequestError` if some segment can never be spoken."""
        for index, spec in enumerate(stream.request.segments):
            self._tokens.check_size(self._token_request(stream, index, spec, with_context=False))

    def _token_request(
        self, stream: Stream, index: int, spec: SpeechSegment, *, with_context: bool
    ) -> TokenRequest:
        request = stream.request
        num_own = len(spec.prompt_ids) + (len(stream.voice.prompt_ids) if stream.voice else 0)
        num_steps = spec.max_steps or self._max_tokens
        room = min(self._max_tokens - num_steps, self._tokens.max_prompt_tokens) - num_own
        prompt_ids, frames = segment_prompt(self._model, stream, spec, room if with_context else 0)
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=num_steps,
            stop_token_ids=(*request.sampling.stop_token_ids, *self._model.stop_ids),
            sample_index=request.sampling.sample_index + index * MAX_SAMPLES,
        )
        return TokenRequest(
            prompt_ids=prompt_ids,
            prompt_frames=frames,
            sampling=sampling,
            priority=0 if not request.is_live else 2 if index else 1,  # who has begun goes on
            tenant=request.tenant,
        )

    def _begin_segment(self, stream: Stream, now_s: float) -> None:
        """Have the codes of the next segment drawn."""
        job, index = stream.job, stream.num_started
        spec = stream.request.segments[index]
        request = self._token_request(stream, index, spec, with_context=True)
        segment = SpokenSegment(
            index=index,
            job_id=f"{job.job_id}#{index}",
            spec=spec,
            guard=RunawayGuard(
                max_tokens=request.sampling.max_tokens,
                tokens_per_s=1.0 / self._model.clock.step_s,
            ),
        )
        stream.num_started += 1
        stream.num_prompt_tokens += len(request.prompt_ids)
        inner = Job(
            job_id=segment.job_id,
            model=job.model,
            request=request,
            sink=partial(self._hear, stream, segment),
            arrival_s=now_s,
            is_paused=stream.is_paused,
        )
        try:
            self._tokens.submit(inner)
        except TriptychError as error:
            self.fail(stream, to_info(error))
        else:
            stream.segments.append(segment)

    # Codes.

    def _hear(self, stream: Stream, segment: SpokenSegment, output: Output[TokenDelta]) -> None:
        """The sink of token jobs; what they say is taken up when their step is booked off."""
        if not stream.is_done and segment.end is None:
            self._heard.append((stream, segment, output))

    def take_tokens(self, codes: Mapping[str, StepCodes], now_s: float) -> None:
        """Take up what token jobs have said. `codes` are what their steps yielded, by job."""
        while self._heard:
            stream, segment, output = self._heard.popleft()
            if stream.is_done or segment.end is not None:
                continue
            if output.error is not None:
                self.fail(stream, output.error)
            elif output.payload is not None:
                self._take_delta(stream, segment, output.payload, codes.get(segment.job_id, ()))
                if stream.drawing is None:
                    self._tokens_over(stream, now_s)

    def _take_delta(
        self, stream: Stream, segment: SpokenSegment, delta: TokenDelta, codes: StepCodes
    ) -> None:
        stream.job.state = JobState.RUNNING
        stream.num_cached_tokens += delta.num_cached_tokens - segment.num_cached_tokens
        segment.num_cached_tokens = delta.num_cached_tokens
        for token_id in delta.token_ids:
            segment.ids.append(token_id)
            segment.codes.append(codes or (token_id,))
            stream.num_output_tokens += 1
            if segment.guard.push((token_id,)) == "loop":
                self._break_off(segment)
                return
        segment.end = delta.finish_reason

    def _break_off(self, segment: SpokenSegment) -> None:
        """End a segment that repeats itself; what is not decoded yet of the repeats is dropped."""
        self.counters.num_loops += 1
        segment.end = "loop"
        num_kept = max(segment.num_pushed, segment.guard.num_sound_tokens)
        del segment.ids[num_kept:], segment.codes[num_kept:]
        self._tokens.cancel(segment.job_id)

    def _tokens_over(self, stream: Stream, now_s: float) -> None:
        if stream.num_started < len(stream.request.segments):
            self._begin_segment(stream, now_s)
        if not stream.is_done:
            self._skip_silent(stream, now_s)

    # Sound.

    def begin_audio(self, piece: AudioPiece) -> AudioRow:
        """Hand a chunk to the decoder."""
        stream, segment = piece.stream, piece.stream.segments[0]
        codes = segment.codes[segment.num_pushed : segment.num_pushed + piece.num_codes]
        is_first = not segment.is_begun
        has_prompt = is_first and self._options.prepend_prompt_speech_tokens != "never"
        segment.num_pushed += piece.num_codes
        segment.is_begun = stream.is_decoding = True
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

    def take_audio(self, piece: AudioPiece, result: AudioRowResult, now_s: float) -> None:
        """Send what a chunk became."""
        stream = piece.stream
        stream.is_decoding = stream.is_alone = False
        self.counters.num_frames += piece.num_frames
        if stream.is_done:
            self._state.settle(stream)
            return
        if not result.is_finite:
            self.counters.num_non_finite += 1
            error = NonFinite("The decoder computed no finite samples for this request.")
            self.fail(stream, to_info(error))
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

    def fail_audio(self, piece: AudioPiece, error: TriptychError, *, is_shared: bool) -> None:
        """A step of the decoder raised.

        Where it ran out of memory with several rows, each segment is decoded anew, by itself.
        """
        stream = piece.stream
        stream.is_decoding = False
        if stream.is_done:
            self._state.settle(stream)
        elif is_shared and isinstance(error, OutOfMemory):
            segment = stream.segments[0]
            segment.num_pushed, segment.is_begun = 0, False
            segment.num_repeated = segment.num_given
            stream.is_alone = True
        else:
            self.fail(stream, to_info(error))

    def _skip_silent(self, stream: Stream, now_s: float) -> None:
        """Finish segments at the head of which nothing is left to decode."""
        while stream.segments and not stream.is_decoding:
            segment, clock = stream.segments[0], self._model.clock
            num_left = clock.num_frames(len(segment.codes)) - clock.num_frames(segment.num_pushed)
            is_held_back = segment.is_begun and clock.lookahead_frames > 0
            if segment.end is None or num_left or is_held_back:
                return
            self._finish_segment(stream, b"", now_s)

    def _finish_segment(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        segment = stream.segments.popleft()
        assert segment.end is not None, "a segment is over when its codes are"
        num_silent = round(segment.spec.pause_s * self._model.sample_rate)
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
            self._end(stream, JobState.FINISHED, Output(job_id=stream.job.job_id, payload=delta))
        else:
            self._send(stream, delta)

    def _give(self, stream: Stream, pcm: bytes, now_s: float) -> None:
        """Keep the listener's clock."""
        if not pcm:
            return
        playback, counters = stream.playback, self.counters
        if not playback.has_begun:
            stream.job.timings["first_audio_s"] = now_s
            counters.num_late_starts += now_s > playback.due_s
        num_underruns, underrun_s = playback.num_underruns, playback.underrun_s
        seconds = len(pcm) / SAMPLE_BYTES / self._model.sample_rate
        playback.give(seconds, now_s)
        counters.audio_s += seconds
        counters.num_underruns += playback.num_underruns - num_underruns
        counters.underrun_s += playback.underrun_s - underrun_s

    # Ending.

    def cancel(self, stream: Stream) -> None:
        """End a stream with a last delta that says so."""
        delta = self._delta(stream, segment=self._index(stream), finish_reason="cancelled")
        self._end(stream, JobState.CANCELLED, Output(job_id=stream.job.job_id, payload=delta))

    def fail(self, stream: Stream, error: ErrorInfo) -> None:
        """End a stream with an error."""
        self._end(stream, JobState.FAILED, Output(job_id=stream.job.job_id, error=error))

    def _end(self, stream: Stream, state: JobState, last: Output[SpeechDelta]) -> None:
        """Let a stream go; its pages and codec row are freed once no step in flight uses them."""
        drawing = stream.drawing
        stream.job.state = state
        self._state.leave(stream)
        if drawing is not None:
            self._tokens.cancel(drawing.job_id)
        stream.segments.clear()
        stream.job.sink(msgspec.structs.replace(last, is_final=True))

    def _index(self, stream: Stream) -> int:
        return stream.segments[0].index if stream.segments else 0

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

    def _send(self, stream: Stream, delta: SpeechDelta) -> None:
        stream.job.sink(Output(job_id=stream.job.job_id, payload=delta))
