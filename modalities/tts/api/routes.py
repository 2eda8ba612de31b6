"""The OpenAI speech API.

Owns the way from a validated request to a call of the service, and from its samples to the bytes of
a file or to events. Keys, limits, errors and disconnects are handled by `core.http`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.http.body import StrictRoute, note_ignored
from triptych.core.http.byte_stream import ByteStream
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.models import ModelCard, ModelList
from triptych.core.http.sse import EventStream, described
from triptych.core.media.audio.containers import AudioEncoder, open_encoder
from triptych.core.process.logs import fields
from triptych.core.text.threads import on_text_thread_if_long
from triptych.core.weights.resolve import open_resolved
from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.service import default_seed, opener
from triptych.modalities.tts.api.captions import caption_file
from triptych.modalities.tts.api.frontend import open_front_end
from triptych.modalities.tts.api.frontend.base import FrontEnd
from triptych.modalities.tts.api.protocol import (
    AudioDelta,
    AudioDone,
    Caption,
    CaptionedSpeech,
    CaptionedSpeechBody,
    SpeechBody,
    VoiceFields,
    VoiceId,
    WordTimes,
)
from triptych.modalities.tts.api.results import SpeechPiece, SpeechStream, SpokenWord
from triptych.modalities.tts.api.service import SpeechCall, SpeechService
from triptych.modalities.tts.api.voices.routes import voices_router
from triptych.modalities.tts.api.voices.service import VoiceService
from triptych.modalities.tts.api.voices.store import VoiceStore

COVERAGE_HEADER = "x-speech-coverage"
SAMPLE_RATE_HEADER = "x-speech-sample-rate"

AnyBody: TypeAlias = SpeechBody | CaptionedSpeechBody
_LINES = "application/x-ndjson"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"audio/*": _BINARY, **described(AudioDelta, AudioDone)},
        "description": "The sound, streamed while it is generated.",
    }
}
_CAPTIONED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": CaptionedSpeech,
        "content": {_LINES: {"schema": {"type": "string"}}},
        "description": "The sound with the times of its words: an object, or one in each line.",
    }
}

_logger = logging.getLogger(__name__)


def open_api(setup: ApiSetup) -> ApiPart:
    """Routes of speech and of voices."""
    fronts = [open_resolved(model, open_front_end) for model in setup.models["speech"]]
    voices = VoiceService(VoiceStore.from_config(setup.config), fronts, setup.pool)
    service = SpeechService(
        setup.client,
        fronts,
        setup.admission,
        max_characters=setup.config.speech.max_speech_characters,
        find_clip=voices.clip,
        default_seed=default_seed(setup.config),
    )
    voices.front_ends = service.models  # as models come and go
    routers = [speech_router(service), speech_models_router(service), voices_router(voices)]
    return ApiPart(
        routers,
        speech_cards(service),
        open_model=opener(service, "speech", open_front_end, speech_card),
        drop_model=service.remove,
        service=service,
    )


def speech_router(service: SpeechService) -> APIRouter:
    """The speech route, served by `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["speech"])

    @router.post("/v1/audio/speech", response_model=None, responses=_ANSWER)
    async def speech(body: SpeechBody, request: Request) -> Response:
        """Speak a text."""
        answer = await _speak(service, body, request)
        if body.stream_format == "sse":
            heartbeat_s = Context.of(request).options.heartbeat_s
            events = _events(answer.encoded, body)
            return EventStream(events, heartbeat_s=heartbeat_s, end=b"")
        chunks = _chunks(answer.encoded)
        return ByteStream(chunks, media_type=answer.encoder.content_type, describe=answer.describe)

    @router.post("/dev/captioned_speech", response_model=None, responses=_CAPTIONED)
    async def captioned_speech(body: CaptionedSpeechBody, request: Request) -> Response:
        """Speak a text, with the times of its words, as Kokoro-FastAPI does."""
        answer = await _speak(service, body, request)
        if body.stream:
            lines = _caption_lines(answer, body)
            return ByteStream(lines, media_type=_LINES, describe=answer.describe)
        return Response(await _whole_caption(answer, body), media_type="application/json")

    return router


@dataclass(frozen=True, slots=True)
class _SpokenAnswer:
    """A call on its way: the pieces with the bytes of the file that they complete."""

    stream: SpeechStream
    encoder: AudioEncoder
    encoded: AsyncGenerator[tuple[bytes, SpeechPiece], None]

    async def describe(self) -> Mapping[str, str]:
        """The headers before the first bytes."""
        return {
            COVERAGE_HEADER: (await self.stream.speakable()).header(),
            SAMPLE_RATE_HEADER: str(self.encoder.sample_rate),
        }


async def _speak(service: SpeechService, body: AnyBody, request: Request) -> _SpokenAnswer:
    context = Context.of(request)
    call = _without_hints(_call(body, context), service.model(body.model), request)
    stream = await on_text_thread_if_long(len(call.text), service.speak, call)
    note_ignored(request, *stream.ignored)
    encoder = await asyncio.to_thread(
        open_encoder, body.response_format, stream.sample_rate, target_rate=body.sample_rate
    )
    return _SpokenAnswer(stream, encoder, _encode_pieces(stream, encoder, body, context))


class SpeechModelList(ModelList):
    """Answer of `/v1/audio/models`. Clients of this route read `models`."""

    models: list[ModelCard]


def speech_models_router(service: SpeechService) -> APIRouter:
    """The route that lists speech models, where web front-ends expect it."""
    router = APIRouter(responses=ERROR_RESPONSES, tags=["models"])

    @router.get("/v1/audio/models", response_model_exclude_none=True)
    async def list_speech_models() -> SpeechModelList:
        """List the speech models."""
        cards = speech_cards(service)
        return SpeechModelList(data=cards, models=cards)

    return router


def speech_cards(service: SpeechService) -> list[ModelCard]:
    """The service's entries in `/v1/models`."""
    return list(map(speech_card, service.models.values()))


def speech_card(front: FrontEnd) -> ModelCard:
    """The entry of a model in `/v1/models`."""
    return ModelCard(id=front.name, task="speech")


def speech_call(fields: VoiceFields, context: Context, text: str = "", **own: Any) -> SpeechCall:
    """The call that the fields of a request mean, with its `own` other fields."""
    asked = {"model", "speed", "instructions", "language", "seed"}
    reading = {} if fields.normalize is None else fields.normalize.model_dump()
    return SpeechCall(
        text=text,
        voice=fields.voice.id if isinstance(fields.voice, VoiceId) else fields.voice or "",
        caller=context.caller,
        **fields.model_dump(include=asked, exclude_none=True),
        **reading,
        **own,
    )


def _call(body: AnyBody, context: Context) -> SpeechCall:
    return speech_call(
        body,
        context,
        body.input,
        input_format=body.input_format,
        has_word_times=body.has_word_times,
    )


def _without_hints(call: SpeechCall, front: FrontEnd, request: Request) -> SpeechCall:
    """Return the call, without instructions if the model follows none, as OpenAI's older models.

    They are reported as ignored, and so is a voice of another server that the model lacks.
    """
    if front.replaces(call.voice):
        note_ignored(request, "voice")
    if not call.instructions or front.takes_instructions:
        return call
    note_ignored(request, "instructions")
    return replace(call, instructions="")


async def _encode_pieces(
    speech_stream: SpeechStream, encoder: AudioEncoder, body: AnyBody, context: Context
) -> AsyncGenerator[tuple[bytes, SpeechPiece], None]:
    """Each piece with the file bytes that it completes, possibly none.

    Counts and times the pieces, and logs the text if prompts are logged.
    """
    ids = context.log_ids
    context.record.model = body.model
    clock = context.metrics.audio_clock(body.model, context.arrived_s)
    if context.options.log_prompts:
        _logger.info("speech", extra=fields(**ids, text=[body.input]))
    async with aclosing(speech_stream.pieces) as pieces:
        async for piece in pieces:
            clock.tick(len(piece.pcm_S) / speech_stream.sample_rate)
            if piece.finish_reason not in (None, "stop"):
                end = {"finish_reason": piece.finish_reason, "coverage": round(piece.coverage, 3)}
                _logger.warning("speech did not end by itself", extra=fields(**ids, **end))
            yield await asyncio.to_thread(_encode, encoder, piece), piece


def _encode(encoder: AudioEncoder, piece: SpeechPiece) -> bytes:
    data = encoder.encode(piece.pcm_S)
    return data if piece.finish_reason is None else data + encoder.finish()


async def _chunks(
    encoded: AsyncGenerator[tuple[bytes, SpeechPiece], None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(encoded):
        async for data, _ in encoded:
            if data:
                yield data


async def _events(
    encoded: AsyncGenerator[tuple[bytes, SpeechPiece], None], body: SpeechBody
) -> AsyncGenerator[BaseModel, None]:
    """The events of a file; words come with the next bytes, and all of them at the end."""
    spoken: list[SpokenWord] = []
    words: list[WordTimes] = []
    num_sent, has_words = 0, bool(body.timestamp_granularities)
    async with aclosing(encoded):
        async for data, piece in encoded:
            spoken += piece.words
            words += map(WordTimes.of, piece.words)
            if data:
                audio = base64.b64encode(data).decode()
                given = {"words": words[num_sent:]} if has_words else {}
                num_sent = len(words)
                yield AudioDelta(type="speech.audio.delta", audio=audio, **given)
            if piece.finish_reason is not None:
                wanted: dict[str, Any] = {"words": words} if has_words else {}
                if body.caption_format:
                    wanted["captions"] = caption_file(spoken, body.caption_format)
                yield AudioDone.of(piece, **wanted)


async def _captioned(answer: _SpokenAnswer) -> AsyncGenerator[tuple[bytes, list[Caption]], None]:
    """The bytes of a file, with the words since the last ones; the last may have no bytes."""
    waiting: list[Caption] = []
    async with aclosing(answer.encoded):
        async for data, piece in answer.encoded:
            waiting += map(Caption.of, piece.words)
            if data or (piece.finish_reason is not None and waiting):
                yield data, waiting
                waiting = []


def _caption(answer: _SpokenAnswer, data: bytes, words: list[Caption] | None) -> bytes:
    captioned = CaptionedSpeech(
        audio=base64.b64encode(data).decode(),
        audio_format=answer.encoder.content_type,
        timestamps=words,
    )
    return captioned.model_dump_json().encode()


async def _caption_lines(
    answer: _SpokenAnswer, body: CaptionedSpeechBody
) -> AsyncGenerator[bytes, None]:
    """A line of JSON for each piece of the file."""
    async with aclosing(_captioned(answer)) as pieces:
        async for data, words in pieces:
            yield _caption(answer, data, words if body.return_timestamps else None) + b"\n"


async def _whole_caption(answer: _SpokenAnswer, body: CaptionedSpeechBody) -> bytes:
    """The whole file with all words, as one object."""
    file, found = bytearray(), list[Caption]()
    async with aclosing(_captioned(answer)) as pieces:
        async for data, words in pieces:
            file += data
            found += words
    return _caption(answer, bytes(file), found if body.return_timestamps else None)
