"""The transcription service of HTTP routes and the Python pipeline.

Owns the steps of a recording: decoding, admission, engine jobs part by part, segments, and the
bound on decoded audio in memory. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from triptych.core.engine_api.caller import Caller
from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import InvalidRequest
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import TRANSCRIPTION_LIMITS, ClipLimits
from triptych.core.media.audio.resampling import Pcm
from triptych.modalities.asr.api.transcript import (
    RecognizerText,
    TranscriptDelta,
    TranscriptSegment,
)
from triptych.modalities.asr.spec import MAX_PART_S, SAMPLE_RATE
from triptych.modalities.asr.traits import Task
from triptych.modalities.asr.windows import MAX_PROMPT_TEMPERATURE
from triptych.modalities.asr.wire import (
    TimedTokens,
    TranscribeDelta,
    TranscribeRequest,
    TranscriptToken,
)
from triptych.modalities.service import HoldLimit, ModelService
from triptych.schedulers.admission import Admission

MIN_SECONDS = 0.1
MAX_HELD_S = 4 * 3600
"""Seconds of decoded audio that all requests together may hold: a gigabyte."""
_SILENCE = 10 ** (-70 / 20)
_TOKENS_PER_SECOND = 8
"""Tokens per second of audio for admission: an upper bound for speech."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscribeCall:
    """One call. `temperature` 0 is greedy, with higher temperatures as fallback."""

    model: str
    language: str = ""
    task: Task = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None  # None: 0, so that equal requests give equal texts; -1: random
    has_word_times: bool = False
    expected: tuple[TranscriptSegment, ...] = ()  # of an earlier pass over the same sound
    caller: Caller = field(default_factory=Caller)


class AsrService(ModelService[RecognizerText]):
    """Serves transcription from an engine client."""

    kind = "transcription model"

    def __init__(
        self,
        client: EngineClient,
        models: Sequence[RecognizerText],
        admission: Admission,
        reader: ClipReader,
    ) -> None:
        super().__init__(client, models, admission)
        self._reader = reader
        self._held = HoldLimit("Too much audio is being transcribed; try again later.")

    def check(self, call: TranscribeCall) -> RecognizerText:
        """The call's model, after checking the call against it. Raises `RequestError`s."""
        model = self.model(call.model)
        model.traits.check_task(model.name, call.task)
        model.traits.check_language(model.name, call.language)
        if not 0 <= call.temperature <= 1:
            raise InvalidRequest("temperature must be between 0 and 1.", param="temperature")
        model.traits.check_options(
            model.name,
            prompt=call.prompt,
            temperature=call.temperature,
            has_word_times=call.has_word_times,
        )
        return model

    async def read(
        self, data: bytes | bytearray | memoryview, limits: ClipLimits | None = None
    ) -> Pcm:
        """Decode a file, by default within the limits of uploads.

        Raises the reader's errors, and `InvalidRequest` for silence.
        """
        pcm_S = await self._reader.read(
            data, sample_rate=SAMPLE_RATE, limits=limits or TRANSCRIPTION_LIMITS
        )
        check_sound(pcm_S)
        return pcm_S

    async def transcribe(
        self, call: TranscribeCall, pcm_S: Pcm
    ) -> AsyncGenerator[TranscriptDelta, None]:
        """Transcribe mono samples at 16 kHz, window by window. Closing it cancels the work."""
        model, caller = self.check(call), call.caller
        duration_s = len(pcm_S) / SAMPLE_RATE
        num_tokens = int(duration_s * _TOKENS_PER_SECOND) + 1
        ticket = self._admission.admit(key=caller.principal.key, num_jobs=1, num_tokens=num_tokens)
        with ticket, self._held.hold(duration_s, MAX_HELD_S):
            recording = _Recording(model, call, self._seed(call.seed or 0), duration_s)
            for part in count():
                request = recording.next_request(pcm_S, part)
                outputs = self.client.submit(
                    call.model,
                    request,
                    job_id=f"{caller.call_id}.{part}",
                    deadline_s=caller.deadline_s,
                    client=caller.client,
                )
                async with aclosing(outputs) as stream:
                    async for output in stream:
                        if isinstance(output.payload, TranscribeDelta):
                            yield recording.take(output.payload)
                recording.end_part(request)
                if request.is_last:
                    return


def check_sound(pcm_S: Pcm) -> None:
    """Raise `InvalidRequest` for audio that is too short or silent (-70 dBFS)."""
    if len(pcm_S) < MIN_SECONDS * SAMPLE_RATE:
        raise InvalidRequest(f"The audio is shorter than {MIN_SECONDS:g} s.", param="file")
    if float(np.ptp(pcm_S)) < 2 * _SILENCE:
        raise InvalidRequest("The audio is silent.", param="file")


def _timed(segment: TranscriptSegment) -> TimedTokens:
    """A segment as the engine has it."""
    tokens = tuple(map(TranscriptToken, segment.token_ids))
    return TimedTokens(start_s=segment.start_s, end_s=segment.end_s, tokens=tokens)


class _Recording:
    """The progress of one recording, sent to the engine in parts that fit into a message."""

    def __init__(
        self, model: RecognizerText, call: TranscribeCall, seed: int, duration_s: float
    ) -> None:
        self._model = model
        self._call = call
        self._duration_s = duration_s
        self._seed = seed
        self._context = list(model.prompt_ids(call.prompt))
        self._language = model.traits.check_language(model.name, call.language)
        self._num_segments = self._start = self._heard = 0
        self._has_text = False

    def next_request(self, pcm_S: Pcm, part: int) -> TranscribeRequest:
        """The next engine request."""
        part_S = pcm_S[self._start : self._start + MAX_PART_S * SAMPLE_RATE]
        return TranscribeRequest(
            pcm=part_S.astype("<f4").tobytes(),
            language=self._language,
            task=self._call.task,
            prompt_ids=tuple(self._context[-self._model.traits.max_prompt_tokens :]),
            temperature=self._call.temperature,
            seed=self._seed + part,
            has_word_times=self._call.has_word_times,
            is_last=self._start + len(part_S) == len(pcm_S),
            expected=() if part else tuple(map(_timed, self._call.expected)),
            tenant=self._call.caller.principal.tenant,
        )

    def take(self, delta: TranscribeDelta) -> TranscriptDelta:
        """Convert the engine's delta for the caller. The whole text starts without a space."""
        self._heard = round(delta.heard_s * SAMPLE_RATE)
        self._language = delta.language or self._language
        offset_s = self._start / SAMPLE_RATE
        segments = tuple(
            self._model.segment(timed, self._num_segments + n, offset_s, self._language)
            for n, timed in enumerate(delta.segments)
        )
        self._num_segments += len(segments)
        for segment in segments if self._model.traits.continues_text else ():
            self._context.extend(segment.token_ids)
            if segment.temperature > MAX_PROMPT_TEMPERATURE:
                self._context.clear()
        text = "".join(segment.text for segment in segments)
        text = text if self._has_text else text.lstrip()
        self._has_text |= bool(text)
        return TranscriptDelta(
            text=text,
            segments=segments,
            language=self._language,
            heard_s=min(offset_s + delta.heard_s, self._duration_s),
            duration_s=self._duration_s,
        )

    def end_part(self, request: TranscribeRequest) -> None:
        """End a part; the next one starts where the engine stopped."""
        assert self._heard or request.is_last, "a full part has at least one window"
        self._start += self._heard
        self._heard = 0
