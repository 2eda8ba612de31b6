"""The answer of a response: chat, spoken while it is written.

Owns the way from a conversation to what a session learns: the prompt, within the model's context,
the words, their sound in the session's format, calls and counts. Knows no events and no turns.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from triptych.core.engine_api.caller import AccessRecord
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedOption
from triptych.core.http.context import Context
from triptych.core.http.socket_answers import SocketAnswers
from triptych.core.media.fetch import Fetched, data_media_type
from triptych.core.text.threads import on_text_thread, on_text_thread_if_long
from triptych.modalities.llm.api.generation import Generation, begin, chat_request
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.replies import UsageReply
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.tools.pieces import CallArguments, CallStart, Words
from triptych.modalities.talk.ports import SpokenAnswer
from triptych.modalities.talk.realtime.inputs import (
    AnswerCall,
    AnswerEnded,
    AnswerSpeech,
    AnswerText,
    LearnedAnswer,
    StartAnswer,
)
from triptych.modalities.talk.realtime.settings import (
    Conversation,
    chat_tool_choice,
    chat_tools,
)
from triptych.modalities.talk.realtime.sound_output import SoundOutput
from triptych.modalities.tts.api.service import SpeechCall

_IMAGE = "triptych-image:"
"""Stands for the data URL of an image in a request; the file is passed apart from it."""


@dataclass(frozen=True, slots=True)
class SessionAnswers:
    """Answers the responses of one session. `speech_model` speaks; empty: there is none."""

    chat: LlmService
    speaker: SpokenAnswer
    chat_model: str
    speech_model: str
    context: Context
    followed: SocketAnswers

    def rename(self, answer_id: str, response_id: str) -> None:
        """Let an answer that was begun ahead be found by the id of its response."""
        self.followed.rename(self.context, answer_id, response_id)

    async def answer(self, start: StartAnswer) -> AsyncGenerator[LearnedAnswer, None]:
        """Yield what a session learns of one answer. Closing it cancels all jobs."""
        context = replace(
            self.context,
            call_id=f"{self.context.call_id}.{start.response_id}",
            record=AccessRecord(),
            arrived_s=time.monotonic(),
        )
        with self.followed.follow(context, start.response_id):
            async with aclosing(self._answer(start, context)) as news:
                async for each in news:
                    yield each

    async def _answer(
        self, start: StartAnswer, context: Context
    ) -> AsyncGenerator[LearnedAnswer, None]:
        settings = start.settings
        generation = await self._begin(settings, start.messages, context)
        writing = _Writing(generation)
        try:
            async with aclosing(generation.deltas):
                if settings.speaks:
                    spoken = self._spoken(start.response_id, settings, writing, context)
                    async with aclosing(spoken) as sounds:
                        async for sound in sounds:
                            yield sound
                else:
                    async for text in writing.words():
                        yield AnswerText(start.response_id, text)
        finally:  # also of an answer that was interrupted
            self._record(generation.usage.total())
        for call in writing.calls:
            yield AnswerCall(start.response_id, call.name, call.arguments)
        usage = _usage(generation.usage.total())
        yield AnswerEnded(start.response_id, writing.is_cut, usage)

    async def _spoken(
        self, response_id: str, settings: Conversation, writing: _Writing, context: Context
    ) -> AsyncGenerator[AnswerSpeech, None]:
        if not self.speech_model:
            raise UnsupportedOption(
                'No speech model is served: set output_modalities to ["text"].',
                param="output_modalities",
            )
        output = settings.audio.output
        call = SpeechCall(
            model=self.speech_model,
            text="",
            voice=output.voice_name,
            speed=output.speed,
            caller=context.caller,
        )
        sound = SoundOutput(output.format.form)
        clock = context.metrics.audio_clock(self.speech_model, context.arrived_s)
        async with aclosing(self.speaker.speak(writing.words(), call)) as chunks:
            async for chunk in chunks:
                clock.tick(len(chunk.pcm_S) / chunk.sample_rate)
                data = sound.push(chunk.pcm_S, chunk.sample_rate)
                if data or chunk.text:
                    yield AnswerSpeech(response_id, chunk.text, data, sound.milliseconds(data))
        if tail := sound.finish():
            yield AnswerSpeech(response_id, "", tail, sound.milliseconds(tail))

    async def _begin(
        self, settings: Conversation, messages: Sequence[Mapping[str, Any]], context: Context
    ) -> Generation:
        """Begin to write. Under `truncation: auto` the oldest turns give way to the context."""
        head = [message for message in messages[:1] if message["role"] == "system"]
        turns = list(messages[len(head) :])
        while True:
            body, files = await self._request(settings, [*head, *turns])
            try:
                prompt = await self._encode(body, files, context)
                return await begin(self.chat, body, context, [prompt])
            except ContextLengthExceeded:
                later = _later(turns)
                if settings.truncation == "disabled" or not later:
                    raise
                turns = later

    async def _request(
        self, settings: Conversation, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[ChatRequest, dict[str, Fetched]]:
        texts, files = await on_text_thread_if_long(
            sum(map(_num_image_chars, messages)), partial(_split, messages)
        )
        given: dict[str, Any] = {"model": self.chat_model, "messages": texts}
        if not messages:
            raise InvalidRequest("The conversation is empty: add an item or instructions.")
        if settings.tools:
            given["tools"] = chat_tools(settings.tools)
        if settings.tools or settings.tool_choice not in ("auto", "none"):
            given["tool_choice"] = chat_tool_choice(settings.tool_choice)
        return chat_request({**given, **_length(settings)}), files

    async def _encode(
        self, body: ChatRequest, files: Mapping[str, Fetched], context: Context
    ) -> TokenRequest:
        def work() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            messages = [message.for_template(files.get) for message in body.messages]
            return messages, body.tool_set.for_template()

        num_chars = sum(len(str(message.content)) for message in body.messages)
        messages, tools = await on_text_thread(num_chars, work)
        tenant = context.principal.tenant
        return await self.chat.encode_chat(
            body.model, messages, tools=tools, tenant=tenant, **body.template_options()
        )

    def _record(self, usage: UsageReply) -> None:
        """Add the counts to the record of the session's request."""
        record = self.context.record
        record.add_prompt(self.chat_model, usage.prompt_tokens)
        record.completion_tokens = (record.completion_tokens or 0) + usage.completion_tokens


@dataclass(slots=True)
class _WrittenCall:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class _Writing:
    """The text of an answer; its calls and how it ended are known once `words` is exhausted."""

    generation: Generation
    calls: list[_WrittenCall] = field(default_factory=list)
    is_cut: bool = False

    async def words(self) -> AsyncIterator[str]:
        """Yield what is to be said."""
        async for delta in self.generation.deltas:
            for piece in delta.pieces if delta.pieces is not None else (Words(delta.text),):
                match piece:
                    case Words(text) if text:
                        yield text
                    case CallStart(name):
                        self.calls.append(_WrittenCall(name))
                    case CallArguments(text):
                        self.calls[-1].arguments += text
            self.is_cut |= delta.finish_reason == "length"


def _length(settings: Conversation) -> dict[str, Any]:
    """The fields of a chat request that limit its answer: a spoken one is short by default."""
    if "max_output_tokens" not in settings.model_fields_set:
        return {"modalities": ["text", "audio"]} if settings.speaks else {}
    is_limited = settings.max_output_tokens != "inf"
    return {"max_tokens": settings.max_output_tokens} if is_limited else {}


def _later(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The turns from a later message of the user on, without a quarter of them; none if it is none.

    One at a time would encode a long conversation as often as it has turns.
    """
    starts = [at for at, message in enumerate(turns) if at and message["role"] == "user"]
    return list(turns[starts[len(starts) // 4] :]) if starts else []


def _num_image_chars(message: Mapping[str, Any]) -> int:
    parts = message["content"] if isinstance(message.get("content"), list) else ()
    return sum(len(part["image_url"]["url"]) for part in parts if part["type"] == "image_url")


def _split(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, Fetched]]:
    """The messages with stand-ins for their images, and the files of these."""
    files: dict[str, Fetched] = {}
    return [_without_images(message, files) for message in messages], files


def _without_images(message: Mapping[str, Any], files: dict[str, Fetched]) -> Mapping[str, Any]:
    """The message with stand-ins for its images, which are added to `files`."""
    if not isinstance(message.get("content"), list):
        return message
    content: list[Mapping[str, Any]] = []
    for part in message["content"]:
        if part["type"] != "image_url":
            content.append(part)
            continue
        stand_in = f"{_IMAGE}{len(files)}"
        files[stand_in] = _file_of(part["image_url"]["url"])
        content.append({"type": "image_url", "image_url": {**part["image_url"], "url": stand_in}})
    return {**message, "content": content}


def _file_of(url: str) -> Fetched:
    """The file of a data URL. Raises `InvalidRequest`."""
    head, _, text = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise InvalidRequest("An image is a data URL: data:image/png;base64,...", param="image_url")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("An image is not valid base64.", param="image_url") from error
    return Fetched(data, data_media_type(head))


def _usage(usage: UsageReply) -> dict[str, Any]:
    """The counts as events have them. Sound has no tokens here: what is read is its text."""
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens if details else 0) or 0
    images = getattr(details, "image_tokens", 0) or 0
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens - images,
            "audio_tokens": 0,
            "image_tokens": images,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
    }
