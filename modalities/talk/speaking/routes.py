"""`/v1/audio/speech/stream`: a WebSocket that speaks a text while it is written.

Owns the messages, which are those of vLLM-Omni: `session.config`, then `input.text` as often as
there are words, then `input.done`; each stretch of text comes back as `audio.start`, the bytes of
a file, `audio.done`. Where a text is cut is `cutting`'s, its sound `answer`'s. Any error ends the
session.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, TypeVar, get_args

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from triptych.core.errors import InvalidRequest, TriptychError, UpgradeRequired
from triptych.core.http.context import Context
from triptych.core.http.fields import Strict, Text, type_of
from triptych.core.http.metrics import AudioClock
from triptych.core.http.models import with_model
from triptych.core.http.validation import invalid_body
from triptych.core.http.websocket import WebSocket, WebSocketResponse
from triptych.core.media.audio.containers import AudioEncoder, open_encoder
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import fields
from triptych.core.text.threads import on_text_thread_if_long
from triptych.modalities.talk.ports import SpokenAnswer, SpokenChunk
from triptych.modalities.talk.realtime.events import error_fields, parse_message
from triptych.modalities.talk.realtime.holding import SessionCount
from triptych.modalities.talk.realtime.routes import socket_limits
from triptych.modalities.tts.api.protocol import AudioFormat, VoiceFields
from triptych.modalities.tts.api.routes import speech_call
from triptych.modalities.tts.api.service import SpeechService

ROUTE = "/v1/audio/speech/stream"
_logger = logging.getLogger(__name__)


MessageT = TypeVar("MessageT", bound=Strict)


class WrittenConfig(VoiceFields):
    """The first message: how the text is spoken. Each stretch is a file of its own."""

    type: Literal["session.config"]
    response_format: AudioFormat = "wav"


class WrittenText(Strict):
    """The next characters of the text."""

    type: Literal["input.text"]
    text: Text


class WrittenEnd(Strict):
    """The text has ended."""

    type: Literal["input.done"]


def written_router(
    service: SpeechService, speaker: SpokenAnswer, options: ServerOptions, count: SessionCount
) -> APIRouter:
    """Create the route. It is no part of the OpenAPI document, which has no WebSockets."""
    router = APIRouter()
    limits = socket_limits(options)

    @router.get(ROUTE, include_in_schema=False)
    async def stream(request: Request) -> Response:
        """Open a session."""
        if not hasattr(request.state, "upgrade"):
            raise UpgradeRequired(f"{ROUTE} is a WebSocket: open it with ws:// or wss://.")
        key = Context.of(request).principal.key
        count.check(key)

        async def serve(socket: WebSocket) -> None:
            with count.hold(key):
                await _WrittenSpeech(socket, service, speaker, request).run()

        return WebSocketResponse(serve, limits, _last_words)

    return router


class _WrittenSpeech:
    """One session, from its configuration to its end."""

    def __init__(
        self, socket: WebSocket, service: SpeechService, speaker: SpokenAnswer, request: Request
    ) -> None:
        self._socket = socket
        self._service = service
        self._speaker = speaker
        self._request = request
        self._num_stretches = 0
        self._asked_s: float | None = None  # when the first text came: listeners wait from there
        self._encoder: AudioEncoder | None = None

    async def run(self) -> None:
        """Speak the text of the session. Raises the errors of the socket and of speech."""
        context = Context.of(self._request)
        config = await self._configure()
        call = speech_call(config, context)
        front, _ = self._service.check(call)
        await self._service.check_clip(call)
        context.record.model = config.model
        clock: AudioClock | None = None
        ignored = {"ignored": ["voice"]} if front.replaces(call.voice) else {}
        async with aclosing(self._speaker.speak(self._texts(context), call)) as chunks:
            async for chunk in chunks:
                assert self._asked_s is not None, "sound is of a text"
                clock = clock or context.metrics.audio_clock(config.model, self._asked_s)
                clock.tick(len(chunk.pcm_S) / chunk.sample_rate)
                if len(chunk.pcm_S):
                    await self._send_sound(chunk, config, ignored)
        await self._finish()
        await self._send("session.done", total_sentences=self._num_stretches)

    async def _configure(self) -> WrittenConfig:
        value = await self._message()
        _check_type(value, WrittenConfig)
        return _validated(WrittenConfig, with_model(self._request, WrittenConfig, value))

    async def _texts(self, context: Context) -> AsyncGenerator[str, None]:
        """The text as it is written; it is logged if prompts are logged."""
        most = self._service.max_characters
        while _check_type(value := await self._message(), WrittenText, WrittenEnd) is WrittenText:
            text = _validated(WrittenText, value).text
            self._asked_s = self._asked_s or time.monotonic()
            if len(text) > most:
                raise InvalidRequest(f"A message has at most {most} characters.", param="text")
            if context.options.log_prompts:
                _logger.info("speech", extra=fields(**context.log_ids, text=[text]))
            yield text
        _validated(WrittenEnd, value)

    async def _message(self) -> Any:
        text = await self._socket.receive()
        return await on_text_thread_if_long(len(text), parse_message, text)

    async def _send_sound(
        self, chunk: SpokenChunk, config: WrittenConfig, ignored: dict[str, Any]
    ) -> None:
        """Send a chunk; with text it begins a stretch."""
        if chunk.text or self._encoder is None:
            await self._finish()
            self._encoder = await asyncio.to_thread(
                open_encoder,
                config.response_format,
                chunk.sample_rate,
                target_rate=config.sample_rate,
            )
            await self._send(
                "audio.start",
                sentence_index=self._num_stretches,
                sentence_text=chunk.text,
                format=config.response_format,
                sample_rate=self._encoder.sample_rate,
                **ignored,
            )
        if data := await asyncio.to_thread(self._encoder.encode, chunk.pcm_S):
            await self._socket.send(data)

    async def _finish(self) -> None:
        """End the stretch that is being sent, if there is one."""
        if self._encoder is None:
            return
        if data := await asyncio.to_thread(self._encoder.finish):
            await self._socket.send(data)
        self._encoder = None
        await self._send("audio.done", sentence_index=self._num_stretches)
        self._num_stretches += 1

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind, **fields}))


def _check_type(value: Any, *kinds: type[Strict]) -> type[Strict]:
    """Return the kind of a message, one of `kinds`. Raises `InvalidRequest`."""
    names = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}
    kind = names.get(type_of(value)) if isinstance(value, dict) else None
    if kind is None:
        raise InvalidRequest(f"Here a message has the type {' or '.join(names)}.", param="type")
    return kind


def _validated(kind: type[MessageT], value: Any) -> MessageT:
    """Return the message that `value` is. Raises `InvalidRequest`s that name the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid_body(kind, error) from error


def _last_words(error: TriptychError) -> str:
    return json.dumps({**error_fields(error), "type": "error"})
