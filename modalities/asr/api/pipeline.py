"""The Python interface for transcription.

Owns the `TranscriptionPipeline`: the server's engine and service, in this process. Audio comes from
the caller, so it is also decoded in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypedDict, Unpack

import numpy as np

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.intake import ClipLimits
from triptych.core.media.audio.resampling import Pcm, Resampler
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.asr.api.service import (
    MAX_HELD_S,
    AsrService,
    TranscribeCall,
    check_sound,
)
from triptych.modalities.asr.api.transcript import (
    RecognizerText,
    Transcript,
    TranscriptDelta,
    TranscriptSegment,
    gather,
)
from triptych.modalities.asr.modality import ASR
from triptych.modalities.asr.spec import SAMPLE_RATE
from triptych.modalities.asr.traits import Task
from triptych.modalities.modality import Modality
from triptych.modalities.pipeline import Pipeline
from triptych.schedulers.admission import Admission

Audio: TypeAlias = "str | Path | bytes | Pcm | tuple[Pcm, int]"
"""A file's path or its bytes; mono samples [S] at 16 kHz, or with their rate in Hz."""
MIN_RATE, MAX_RATE = 1_000, 768_000
"""Rates in Hz at which samples may be given."""
OWN_LIMITS = ClipLimits(max_bytes=4 * 2**30, max_seconds=MAX_HELD_S)


class TranscribeOptions(TypedDict, total=False):
    """Options of a call, as in `TranscribeCall`."""

    language: str
    task: Task
    prompt: str
    temperature: float
    seed: int | None
    has_word_times: bool


class TranscriptionPipeline(Pipeline[AsrService]):
    """A recognizer in this process.

        with TranscriptionPipeline.from_pretrained() as hear:
            print(hear("meeting.mp3").text)
            for segment in hear.stream("lecture.m4a", language="en"):
                print(segment.start_s, segment.text)

    Every call has an async version that may be awaited on any loop.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (ASR,)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], AsrService]:
        model = RecognizerText.open(resolved)
        admission, reader = Admission(options=config.schedule), ClipReader(None)
        return lambda client: AsrService(client, [model], admission, reader)

    def __call__(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcript:
        """Transcribe a recording.

        Raises `RequestError`s, for instance for silence or an unknown language.
        """
        return self._loop.run(self._whole(audio, options))

    async def acall(self, audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcript:
        """Async version of calling the pipeline."""
        return await self._loop.run_async(self._whole(audio, options))

    def stream(
        self, audio: Audio, **options: Unpack[TranscribeOptions]
    ) -> Iterator[TranscriptSegment]:
        """Transcribe a recording segment by segment. Leaving the loop early ends the work."""
        return self._loop.iterate(lambda: self._segments(audio, options))

    def astream(
        self, audio: Audio, **options: Unpack[TranscribeOptions]
    ) -> AsyncGenerator[TranscriptSegment, None]:
        """Async version of `stream`."""
        return self._loop.iterate_async(lambda: self._segments(audio, options))

    def deltas(
        self, audio: Audio, **options: Unpack[TranscribeOptions]
    ) -> Iterator[TranscriptDelta]:
        """Like `stream`, window by window, with progress; `gather` joins them to a transcript."""
        return self._loop.iterate(lambda: self._deltas(audio, options))

    def map(
        self, entries: Iterable[Mapping[str, Any]], *, num_in_flight: int = 8
    ) -> Iterator[Transcript | TriptychError]:
        """The transcripts of many entries, in order, `num_in_flight` at a time.

        An entry holds `audio` and options of a call; a `model` must be this one. An entry that
        fails yields its error and does not affect the others.
        """

        async def transcribe(entry: Mapping[str, Any]) -> Transcript:
            self._check_model(entry.get("model"))
            options: Any = {k: v for k, v in entry.items() if k not in ("audio", "model")}
            return await self._whole(entry["audio"], options)

        return self._map_entries(transcribe, entries, min(num_in_flight, self._service.max_jobs))

    async def _whole(self, audio: Audio, options: TranscribeOptions) -> Transcript:
        async with aclosing(self._deltas(audio, options)) as deltas:
            return gather([delta async for delta in deltas])

    async def _segments(
        self, audio: Audio, options: TranscribeOptions
    ) -> AsyncGenerator[TranscriptSegment, None]:
        async with aclosing(self._deltas(audio, options)) as deltas:
            async for delta in deltas:
                for segment in delta.segments:
                    yield segment

    async def _deltas(
        self, audio: Audio, options: TranscribeOptions
    ) -> AsyncGenerator[TranscriptDelta, None]:
        pcm_S = await self._read(audio)
        call = TranscribeCall(model=self._model, **options)
        async with aclosing(self._service.transcribe(call, pcm_S)) as deltas:
            async for delta in deltas:
                yield delta

    async def _read(self, audio: Audio) -> Pcm:
        if isinstance(audio, np.ndarray):
            audio = (audio, SAMPLE_RATE)
        if isinstance(audio, tuple):
            pcm_S, sample_rate = _checked(audio)
            if sample_rate != SAMPLE_RATE:
                pcm_S = await asyncio.to_thread(resample, pcm_S, sample_rate)
            check_sound(pcm_S)
            return pcm_S
        if isinstance(audio, str | Path):
            audio = await asyncio.to_thread(_file_bytes, Path(audio))
        return await self._service.read(audio, OWN_LIMITS)


def _checked(audio: tuple[Any, ...]) -> tuple[Pcm, int]:
    """Samples and their rate. Raises `InvalidRequest`."""
    pcm_S, sample_rate = audio if len(audio) == 2 else (None, None)
    is_array = isinstance(pcm_S, np.ndarray) and pcm_S.ndim == 1 and pcm_S.dtype.kind == "f"
    if not is_array or not np.isfinite(np.asarray(pcm_S)).all():
        raise InvalidRequest("Samples must be finite floats, mono, in a one-dimensional array.")
    if not isinstance(sample_rate, Integral) or not MIN_RATE <= int(sample_rate) <= MAX_RATE:
        raise InvalidRequest(
            f"The rate of samples must be a whole number of {MIN_RATE} to {MAX_RATE} Hz."
        )
    return np.asarray(pcm_S), int(sample_rate)


def resample(pcm_S: Pcm, sample_rate: int) -> Pcm:
    """Resample mono samples from `sample_rate` (Hz) to a recognizer's 16 kHz."""
    resampler = Resampler(sample_rate, SAMPLE_RATE)
    return np.concatenate([resampler.push(pcm_S), resampler.flush()])


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path.name} cannot be read ({error.strerror}).") from error
