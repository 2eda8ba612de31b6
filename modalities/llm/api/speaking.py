"""Chat answers that are spoken: text and sound of one request, while both are made.

Owns how the two are joined, whole and as a stream, and the file that the sound becomes. Speech is
behind `api.sound.ChatSound`. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from triptych.core.engine_api.caller import Caller
from triptych.core.errors import UnsupportedOption
from triptych.core.http.context import Context
from triptych.core.media.audio.containers import AudioEncoder, open_encoder
from triptych.modalities.llm.api.formatters import AnswerDetails, ChatFormatter
from triptych.modalities.llm.api.generation import Generation
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.replies import (
    AnswerAudio,
    AnswerAudioDelta,
    AnswerMessage,
    ChatChunk,
    MessageDelta,
    UsageTotals,
)
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.sound import (
    SPOKEN_TOKENS_PER_S,
    ChatSound,
    SpokenPiece,
    VoiceChoice,
    written_and_spoken,
)
from triptych.modalities.llm.api.spoken_answers import SpokenId
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tools.pieces import Answer, AnswerPiece, Words

Event: TypeAlias = SampleDelta | SpokenPiece
_FORMATS: Final = {"pcm16": "pcm"}


@dataclass(frozen=True, slots=True)
class AnswerVoice:
    """The voice of one answer, checked, and the encoder of its file."""

    sound: ChatSound
    choice: VoiceChoice
    encoder: AudioEncoder

    @classmethod
    async def of(cls, service: LlmService, body: ChatRequest, caller: Caller) -> AnswerVoice | None:
        """The voice of the answer to `body`, `None` for text alone. Raises `RequestError`s."""
        if not body.is_spoken:
            return None
        if service.sound is None:
            raise UnsupportedOption("No answer is spoken here: leave it out.", param="modalities")
        voice, model, given = "", "", None
        if body.audio is not None:
            voice, model, given = body.audio.voice_name, body.audio.model or "", body.audio.format
        choice = VoiceChoice(voice=voice, model=model, is_live=bool(body.stream))
        rate = await service.sound.check_voice(choice, caller)
        name = given or ("pcm16" if body.stream else "wav")
        encoder = await asyncio.to_thread(open_encoder, _FORMATS.get(name, name), rate)
        return cls(service.sound, choice, encoder)

    @property
    def is_replaced(self) -> bool:
        """Whether another voice speaks, as the model lacks this one of another server."""
        return self.sound.is_replaced(self.choice)


class SpokenFormatter(ChatFormatter):
    """Formats spoken answers: their words are the transcript of a sound, not a content."""

    def __init__(
        self, model: TextModel, call_id: str, details: AnswerDetails, answer: SpokenId
    ) -> None:
        super().__init__(model, call_id, details)
        self._answer = answer
        self._has_id = False
        self.data = b""
        """The file, of a whole answer."""

    def sound_chunk(self, data: bytes) -> ChatChunk:
        """The next bytes of the file."""
        return self._piece(0, self._audio(data=base64.b64encode(data).decode()))

    def end_chunk(self) -> ChatChunk:
        """The end of the sound."""
        return self._piece(0, self._audio(expires_at=self._answer.expires_at))

    def _audio(self, **fields: Any) -> MessageDelta:
        if not self._has_id:
            self._has_id, fields["id"] = True, self._answer.id
        return MessageDelta(audio=AnswerAudioDelta(**fields))

    def _first(self, pieces: Sequence[AnswerPiece]) -> MessageDelta:
        return MessageDelta(role="assistant", content=None)

    def _delta(self, index: int, piece: AnswerPiece) -> MessageDelta:
        if isinstance(piece, Words):
            return self._audio(transcript=piece.text)
        return super()._delta(index, piece)

    def _message(self, answer: Answer) -> AnswerMessage:
        message = super()._message(answer)
        if not answer.text:
            return message
        audio = AnswerAudio(
            id=self._answer.id,
            data=base64.b64encode(self.data).decode(),
            expires_at=self._answer.expires_at,
            transcript=answer.text,
        )
        return message.model_copy(update={"content": None, "audio": audio})


class SpokenChat:
    """One spoken answer on its way. It is kept for later requests once it is whole."""

    def __init__(
        self, service: LlmService, generation: Generation, voice: AnswerVoice, context: Context
    ) -> None:
        self.answer = service.spoken_answers.new_id()
        self._kept = service.spoken_answers
        self._generation = generation
        self._voice = voice
        self._caller = context.caller
        model = voice.sound.speech_model(voice.choice)
        self._clock = context.metrics.audio_clock(model, context.arrived_s)
        self._encoder = voice.encoder
        self._words: list[str] = []
        self._num_samples = 0

    async def documents(
        self, formatter: SpokenFormatter, body: ChatRequest
    ) -> AsyncGenerator[BaseModel, None]:
        """The chunks of a stream: the words as they are written, the sound as it is made."""
        usage, last, waiting = self._generation.usage, list[ChatChunk](), b""
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, SampleDelta):
                    chunks = list(formatter.chunks(event))
                    if event.finish_reason is not None:
                        last.append(chunks.pop())
                else:
                    waiting += await self._encode(event)
                    size = len(waiting) - len(waiting) % 3  # base64 of which can be joined
                    data, waiting = waiting[:size], waiting[size:]
                    chunks = [formatter.sound_chunk(data)] if data else []
                for chunk in chunks:
                    yield _with_usage(chunk, body, usage)
        if self._words:
            if tail := waiting + await asyncio.to_thread(self._encoder.finish):
                yield _with_usage(formatter.sound_chunk(tail), body, usage)
            self._keep()
            yield _with_usage(formatter.end_chunk(), body, usage)
        for chunk in last:
            yield _with_usage(chunk, body, usage)
        if body.has_usage_chunk:
            yield formatter.usage_chunk(usage.total())

    async def reply(self, formatter: SpokenFormatter) -> BaseModel:
        """The whole answer with its file, whose head states the length if it can."""
        deltas: list[SampleDelta] = []
        file = bytearray()
        async with aclosing(self._events()) as events:
            async for event in events:
                if isinstance(event, SampleDelta):
                    deltas.append(event)
                else:
                    file += await self._encode(event)
        if self._words:
            file += await asyncio.to_thread(self._encoder.finish)
            head = self._encoder.final_head()
            file[: len(head)] = head
            self._keep()
        formatter.data = bytes(file)
        usage = self._generation.usage.total()
        return await asyncio.to_thread(formatter.reply, [deltas], usage)  # minutes of base64

    def _keep(self) -> None:
        words = "".join(self._words)
        self._kept.keep(self.answer, self._caller.principal.owner, words)

    def _events(self) -> AsyncGenerator[Event, None]:
        """Text and sound as they come. Closing it ends both."""
        voice = self._voice

        def speak(texts: AsyncIterator[str]) -> AsyncGenerator[SpokenPiece, None]:
            return voice.sound.speak(texts, voice.choice, self._caller)

        return written_and_spoken(self._generation.deltas, self._take_words, speak)

    def _take_words(self, delta: SampleDelta) -> list[str]:
        """The words of a delta, which are kept."""
        words = [piece.text for piece in delta.shown if isinstance(piece, Words)]
        self._words += words
        return words

    async def _encode(self, sound: SpokenPiece) -> bytes:
        self._clock.tick(len(sound.pcm_S) / sound.sample_rate)
        self._num_samples += len(sound.pcm_S)
        seconds = self._num_samples / sound.sample_rate
        self._generation.usage.num_spoken_tokens = round(seconds * SPOKEN_TOKENS_PER_S)
        return await asyncio.to_thread(self._encoder.encode, sound.pcm_S)


def _with_usage(chunk: ChatChunk, body: ChatRequest, usage: UsageTotals) -> ChatChunk:
    if body.has_running_usage:
        chunk.usage = usage.total()
    return chunk
