"""Hears and speaks for chat, with the recognition and the speech that are served.

Owns which models those are, and the words of recordings that were heard before: a conversation
sends its earlier turns again. Knows no fields of the chat API.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

from triptych.core.engine_api.caller import Caller
from triptych.core.errors import InvalidRequest, RequestError, UnsupportedOption
from triptych.core.media.audio.intake import sniff
from triptych.modalities.asr.api.service import AsrService, TranscribeCall
from triptych.modalities.asr.api.transcript import gather
from triptych.modalities.asr.spec import SAMPLE_RATE
from triptych.modalities.llm.api.sound import HeardSpeech, SpokenPiece, VoiceChoice
from triptych.modalities.talk.speaking.answer import AnswerSpeaker
from triptych.modalities.tts.api.service import SpeechCall, SpeechService

MAX_REMEMBERED = 1024
"""Recordings whose words are remembered, of all callers together."""
_DEMUXERS = {
    "wav": ("wav",),
    "mp3": ("mp3",),
    "flac": ("flac",),
    "opus": ("ogg",),
    "ogg": ("ogg",),
    "aac": ("aac", "mov"),
    "m4a": ("mov",),
    "webm": ("matroska",),
}
"""What the bytes of a file in each format begin like."""


class ServedSound:
    """Implements `llm.api.sound.ChatSound`. The first model of each kind is the default."""

    def __init__(self, recognition: AsrService, speech: SpeechService) -> None:
        self._recognition = recognition
        self._speech = speech
        self._speaker = AnswerSpeaker(speech)
        self._heard: OrderedDict[tuple[str, str, bytes], HeardSpeech] = OrderedDict()

    async def check_voice(self, choice: VoiceChoice, caller: Caller) -> int:
        """Return the rate of the speaking model (see the protocol)."""
        call = self._call(choice, caller)
        front, _ = self._speech.check(call)
        await self._speech.check_clip(call)
        return front.sample_rate

    def speech_model(self, choice: VoiceChoice) -> str:
        """Return the name of the model that speaks (see the protocol)."""
        name = choice.model or next(iter(self._speech.models), "")
        if not name:
            raise UnsupportedOption(
                "No speech model is served, so no answer is spoken: start the server with one, such"
                " as `triptych serve embedded triptych-voice`, or leave modalities out.",
                param="modalities",
            )
        return name

    def is_replaced(self, choice: VoiceChoice) -> bool:
        """Whether the default voice speaks instead."""
        return self._speech.model(self.speech_model(choice)).replaces(choice.voice)

    async def speak(
        self, texts: AsyncIterator[str], choice: VoiceChoice, caller: Caller
    ) -> AsyncGenerator[SpokenPiece, None]:
        """Speak an answer while it is written (see the protocol)."""
        async with aclosing(self._speaker.speak(texts, self._call(choice, caller))) as chunks:
            async for chunk in chunks:
                if len(chunk.pcm_S):
                    yield SpokenPiece(chunk.pcm_S, chunk.sample_rate)

    async def hear(self, data: bytes | bytearray, form: str, caller: Caller) -> HeardSpeech:
        """Transcribe a file (see the protocol)."""
        name = next(iter(self._recognition.models), "")
        if not name:
            raise UnsupportedOption(
                "No recognizer is served, so input_audio is not heard: start the server with one,"
                " such as `triptych serve embedded whisper-tiny.en`, or send the words as text.",
                param="messages",
            )
        _check_form(data, form)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
        key = (caller.principal.tenant, name, digest)
        if key not in self._heard:
            self._heard[key] = await self._transcribe(name, data, caller)
            while len(self._heard) > MAX_REMEMBERED:
                self._heard.popitem(last=False)
        self._heard.move_to_end(key)
        return self._heard[key]

    async def _transcribe(self, model: str, data: bytes | bytearray, caller: Caller) -> HeardSpeech:
        own = replace(caller, call_id=f"{caller.call_id}.heard")
        try:
            pcm_S = await self._recognition.read(data)
            call = TranscribeCall(model=model, caller=own)
            async with aclosing(self._recognition.transcribe(call, pcm_S)) as deltas:
                transcript = gather([delta async for delta in deltas])
        except RequestError as error:
            raise _of_message(error) from error
        return HeardSpeech(transcript.text.strip(), len(pcm_S) / SAMPLE_RATE)

    def _call(self, choice: VoiceChoice, caller: Caller) -> SpeechCall:
        return SpeechCall(
            model=self.speech_model(choice),
            text="",
            voice=choice.voice,
            is_live=choice.is_live,
            caller=caller,
        )


def _check_form(data: bytes | bytearray, form: str) -> None:
    """Raise a `RequestError` for a file in another format than it is said to be."""
    try:
        found = sniff(bytes(data[:64]))
    except RequestError as error:
        raise _of_message(error) from error
    if found not in _DEMUXERS[form]:
        raise InvalidRequest(f"input_audio is not {form}: its bytes are {found}.", param="messages")


def _of_message(error: RequestError) -> RequestError:
    return type(error)(f"input_audio: {error.message}", param="messages")
