"""From recordings in messages to their words, before a prompt is made of them.

Owns the order of these steps and where their files are. Sound is heard behind
`api.sound.ChatSound`.
"""

from __future__ import annotations

import base64
import binascii

from fastapi import Request

from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.context import Context
from triptych.core.http.data_urls import data_urls
from triptych.modalities.llm.api.audio_fields import AudioPart
from triptych.modalities.llm.api.messages import Message
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.sound import HEARD_TOKENS_PER_S, ChatSound


async def hear_messages(
    service: LlmService, body: ChatRequest, request: Request
) -> tuple[ChatRequest, int]:
    """Return `body` with the words of its sound, and the number of tokens that were heard.

    Raises a `RequestError` for sound that cannot be heard, and for an id that is not known.
    """
    if not any(message.sounds or message.audio for message in body.messages):
        return body, 0
    owner, seconds = Context.of(request).principal.owner, 0.0
    messages: list[Message] = []
    for message in body.messages:
        words: list[str] = []
        for part in message.sounds:
            heard = await _sound(service).hear(
                _file(part, request), part.input_audio.format, Context.of(request).caller
            )
            words.append(heard.text)
            seconds += heard.duration_s
        spoken = "" if message.text else _spoken(service, message, owner)
        messages.append(message.with_words(words, spoken))
    heard_body = body.model_copy(update={"messages": messages})
    return heard_body, round(seconds * HEARD_TOKENS_PER_S)


def _sound(service: LlmService) -> ChatSound:
    if service.sound is None:
        raise UnsupportedOption("No sound is heard here: send its words.", param="messages")
    return service.sound


def _spoken(service: LlmService, message: Message, owner: str) -> str:
    """The words of an earlier answer; empty for a message without audio."""
    if message.audio is None:
        return ""
    if message.audio.transcript is not None:
        return message.audio.transcript
    return service.spoken_answers.find(message.audio.id, owner)


def _file(part: AudioPart, request: Request) -> bytes | bytearray:
    """The bytes of a recording. Raises `InvalidRequest` for invalid base64."""
    data = part.input_audio.data
    try:
        file = data_urls(request).find(f"data:;base64,{data}")
        return base64.b64decode(data, validate=True) if file is None else file.data
    except (InvalidRequest, binascii.Error) as error:
        raise InvalidRequest("input_audio.data is not valid base64.", param="messages") from error
