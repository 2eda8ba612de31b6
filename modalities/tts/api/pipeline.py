"""Speech from Python: load a model, call it, stream it.

Owns the `SpeechPipeline` object: the same engine and speech service as the server's, in this
process.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Unpack

import numpy as np

from triptych.core.engine_api.client import EngineClient
from triptych.core.http.auth import owners
from triptych.core.media.audio import decode
from triptych.core.media.audio.containers import encode_clip
from triptych.core.media.audio.resampling import Pcm
from triptych.core.media.captions import CaptionFormat
from triptych.core.media.child import DecodePool
from triptych.core.options.config import Config
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.modality import Modality
from triptych.modalities.pipeline import Pipeline
from triptych.modalities.service import default_seed
from triptych.modalities.tts.api.captions import caption_file
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.frontend.base import Voice
from triptych.modalities.tts.api.results import (
    SpeakOptions,
    SpeechPiece,
    SpeechUsage,
    SpokenWord,
    format_of,
)
from triptych.modalities.tts.api.service import SpeechCall, SpeechService
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceStore
from triptych.modalities.tts.modality import SPEECH
from triptych.modalities.tts.wire import SpeechFinish, VoiceClip
from triptych.schedulers.admission import Admission

_log = logging.getLogger(__name__)
MAX_CHARACTERS = 1_000_000
"""Maximum length of a call's text: a thick book."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speech:
    """A spoken text: samples [S], mono, full scale -1 to 1, at `sample_rate` (Hz).

    `coverage` is the share of the text that was spoken, `finish_reason` is "stop" if every segment
    ended by itself. `words` have the times of the words, if the model knows them.
    """

    audio: Pcm
    sample_rate: int
    coverage: float
    finish_reason: SpeechFinish
    usage: SpeechUsage
    words: tuple[SpokenWord, ...] = ()

    @property
    def duration_s(self) -> float:
        """Seconds of sound."""
        return len(self.audio) / self.sample_rate

    def save(self, path: str | Path, *, audio_format: str = "") -> None:
        """Write a file, in the format of its extension unless another is given."""
        audio_format = audio_format or format_of(path)
        Path(path).write_bytes(encode_clip(audio_format, self.sample_rate, self.audio))

    def captions(self, caption_format: CaptionFormat = "srt") -> str:
        """The words as captions: the text of a file, empty of cues if the model knows no times."""
        return caption_file(self.words, caption_format)

    def _repr_html_(self) -> str:
        """An audio player for notebooks."""
        data = base64.b64encode(encode_clip("wav", self.sample_rate, self.audio)).decode()
        return f'<audio controls src="data:audio/wav;base64,{data}"></audio>'


class SpeechPipeline(Pipeline[SpeechService]):
    """A speech model in this process.

        with SpeechPipeline.from_pretrained() as speak:
            speak("Hello there.").save("hello.wav")
            for samples in speak.stream("It was a dark and stormy night."):
                player.write(samples)

    Every method has an async twin that may be awaited on any loop.
    """

    _modalities: ClassVar[tuple[Modality, ...]] = (SPEECH,)

    @classmethod
    def _open_service(
        cls, resolved: ResolvedModel, config: Config
    ) -> Callable[[EngineClient], SpeechService]:
        front = open_front_end(resolved)
        pool = DecodePool([decode.__name__])  # never started: no uploads
        voices = VoiceService(VoiceStore.from_config(config), [front], pool)

        def find_clip(voice_id: str, _: str, model: str) -> VoiceClip | None:
            """A voice kept on this machine, under any of the configured keys."""
            found = (voices.clip(voice_id, owner, model) for owner in owners(config.server))
            return next((clip for clip in found if clip is not None), None)

        return lambda client: SpeechService(
            client,
            [front],
            Admission(options=config.schedule),
            max_characters=MAX_CHARACTERS,
            find_clip=find_clip,
            default_seed=default_seed(config),
        )

    @property
    def sample_rate(self) -> int:
        """Samples per second of the model's sound."""
        return self._service.model(self._model).sample_rate

    @property
    def voices(self) -> tuple[Voice, ...]:
        """The model's built-in voices."""
        return tuple(self._service.model(self._model).voices)

    def __call__(self, text: str, **options: Unpack[SpeakOptions]) -> Speech:
        """Speak a text of any length.

        Raises errors of `core.errors.RequestError`: no words in the text, an unknown voice.
        """
        return self._loop.run(self._whole(text, options))

    async def acall(self, text: str, **options: Unpack[SpeakOptions]) -> Speech:
        """Async twin of calling the pipeline."""
        return await self._loop.run_async(self._whole(text, options))

    def stream(self, text: str, **options: Unpack[SpeakOptions]) -> Iterator[Pcm]:
        """Speak a text and yield samples as they are generated.

        Leaving the loop early cancels the call.
        """
        return self._loop.iterate(lambda: self._samples(text, options))

    def astream(self, text: str, **options: Unpack[SpeakOptions]) -> AsyncGenerator[Pcm, None]:
        """Async twin of `stream`."""
        return self._loop.iterate_async(lambda: self._samples(text, options))

    def pieces(
        self, text: str, *, is_live: bool = True, **options: Unpack[SpeakOptions]
    ) -> Iterator[SpeechPiece]:
        """As `stream`, each piece with its usage and coverage; the last one has a finish reason."""
        return self._loop.iterate(lambda: self._pieces(text, options, is_live=is_live))

    async def _whole(self, text: str, options: SpeakOptions) -> Speech:
        pieces = [piece async for piece in self._pieces(text, options, is_live=False)]
        last = pieces[-1]
        assert last.finish_reason is not None
        return Speech(
            audio=np.concatenate([piece.pcm_S for piece in pieces]),
            sample_rate=self.sample_rate,
            coverage=last.coverage,
            finish_reason=last.finish_reason,
            usage=last.usage,
            words=tuple(word for piece in pieces for word in piece.words),
        )

    async def _samples(self, text: str, options: SpeakOptions) -> AsyncGenerator[Pcm, None]:
        async with aclosing(self._pieces(text, options, is_live=True)) as pieces:
            async for piece in pieces:
                if len(piece.pcm_S):
                    yield piece.pcm_S

    def _pieces(
        self, text: str, options: SpeakOptions, *, is_live: bool
    ) -> AsyncGenerator[SpeechPiece, None]:
        call = SpeechCall(model=self._model, text=text, is_live=is_live, **options)
        stream = self._service.speak(call)
        if stream.ignored:
            _log.warning("without effect here: %s", ", ".join(stream.ignored))
        return stream.pieces
