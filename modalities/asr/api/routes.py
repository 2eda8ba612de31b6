"""The OpenAI transcription API: `/v1/audio/transcriptions` and `/v1/audio/translations`.

Owns turning a form with a file into a service call, and its deltas into an answer. `core.http` has
the code around every route (keys, limits, errors, disconnects).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.models import ModelCard
from triptych.core.http.request_log import answer_chars
from triptych.core.http.sse import EventStream, described
from triptych.core.http.upload import form_body, parsed_form, read_form
from triptych.core.media.audio.decode import ClipReader
from triptych.core.media.audio.resampling import Pcm
from triptych.core.process.logs import fields
from triptych.core.weights.resolve import open_resolved
from triptych.modalities.asr.api.formats import as_srt, as_text, as_vtt
from triptych.modalities.asr.api.protocol import (
    Body,
    TextDelta,
    TextDone,
    TextSegment,
    TranscriptionFields,
    TranscriptionReply,
    TranslationFields,
    VerboseReply,
    json_reply,
    text_delta,
    text_done,
    verbose_reply,
)
from triptych.modalities.asr.api.service import AsrService, TranscribeCall
from triptych.modalities.asr.api.transcript import (
    RecognizerText,
    Transcript,
    TranscriptDelta,
    gather,
)
from triptych.modalities.modality import ApiPart, ApiSetup
from triptych.modalities.service import opener

_PLAIN: dict[str, tuple[Callable[[Transcript], str], str]] = {
    "text": (as_text, "text/plain"),
    "srt": (as_srt, "text/plain"),
    "vtt": (as_vtt, "text/vtt"),
}
Form = TypeVar("Form", TranscriptionFields, TranslationFields)
_logger = logging.getLogger(__name__)


def open_api(setup: ApiSetup) -> ApiPart:
    """The API part of speech recognition."""
    models = [open_resolved(model, RecognizerText.open) for model in setup.models["asr"]]
    reader = ClipReader(setup.pool)
    service = AsrService(setup.client, models, setup.admission, reader)
    return ApiPart(
        [asr_router(service)],
        asr_cards(service),
        open_model=opener(service, "asr", RecognizerText.open, asr_card),
        drop_model=service.remove,
        service=service,
    )


def asr_router(service: AsrService) -> APIRouter:
    """The routes of the transcription API."""
    router = APIRouter(responses=ERROR_RESPONSES, tags=["audio"])

    @router.post(
        "/v1/audio/transcriptions",
        response_model=None,
        responses=_answers(described(TextDelta, TextSegment, TextDone)),
        openapi_extra=form_body(TranscriptionFields, "file"),
    )
    async def transcriptions(request: Request) -> Response:
        """Transcribe an audio file."""
        body, deltas = await _begin(service, request, TranscriptionFields)
        if body.stream:
            heartbeat_s = Context.of(request).options.heartbeat_s
            return EventStream(_events(deltas, body), heartbeat_s=heartbeat_s)
        return await _answer(deltas, body)

    @router.post(
        "/v1/audio/translations",
        response_model=None,
        responses=_answers({}),
        openapi_extra=form_body(TranslationFields, "file"),
    )
    async def translations(request: Request) -> Response:
        """Translate the speech in an audio file to English."""
        body, deltas = await _begin(service, request, TranslationFields)
        return await _answer(deltas, body)

    return router


def asr_cards(service: AsrService) -> list[ModelCard]:
    """The entries of the service's models in `/v1/models`."""
    return list(map(asr_card, service.models.values()))


def asr_card(model: RecognizerText) -> ModelCard:
    """The entry of a model in `/v1/models`."""
    return ModelCard(id=model.name, task="transcription")


def _answers(stream: Mapping[str, Any]) -> dict[int | str, dict[str, Any]]:
    text = {name: {"schema": {"type": "string"}} for name in ("text/plain", "text/vtt")}
    model = TranscriptionReply | VerboseReply
    content = {**text, **stream}
    return {200: {"model": model, "content": content, "description": "The transcript."}}


async def _begin(
    service: AsrService, request: Request, kind: type[Form]
) -> tuple[Form, AsyncGenerator[TranscriptDelta, None]]:
    """Check a form and its audio; returns the fields and the deltas of its transcript."""
    form = await read_form(request)
    upload = form.file("file")
    body = parsed_form(request, form, kind)
    context = Context.of(request)
    call = TranscribeCall(
        model=body.model,
        language=body.language,
        task=body.task,
        prompt=body.prompt,
        temperature=body.temperature,
        seed=body.seed,
        has_word_times=body.has_word_times,
        caller=context.caller,
    )
    service.check(call)
    pcm_S = await service.read(upload.data)
    return body, _observed(service, call, pcm_S, context)


async def _observed(
    service: AsrService, call: TranscribeCall, pcm_S: Pcm, context: Context
) -> AsyncGenerator[TranscriptDelta, None]:
    """Pass deltas through; time them, and log their text where the operator enables it."""
    clock = context.metrics.token_clock(call.model, context.arrived_s)
    context.record.model, context.record.completion_tokens = call.model, 0
    pieces: list[str] = []
    async with aclosing(service.transcribe(call, pcm_S)) as deltas:
        async for delta in deltas:
            num_tokens = sum(len(segment.token_ids) for segment in delta.segments)
            clock.tick(0, num_tokens)
            context.record.completion_tokens += num_tokens
            pieces.append(delta.text)
            yield delta
    if (most := answer_chars(context.options)) != 0:
        _logger.info("transcript", extra=fields(**context.log_ids, text="".join(pieces)[:most]))


async def _answer(deltas: AsyncGenerator[TranscriptDelta, None], body: Body) -> Response:
    async with aclosing(deltas) as stream:
        transcript = gather([delta async for delta in stream])
    if body.response_format in _PLAIN:
        write, media_type = _PLAIN[body.response_format]
        return PlainTextResponse(write(transcript), media_type=media_type)
    reply: BaseModel
    if body.response_format == "json":
        reply = json_reply(transcript, has_logprobs=bool(body.include))
    else:
        reply = verbose_reply(
            transcript, body.task, has_segments=body.has_segments, has_words=body.has_word_times
        )
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")


async def _events(
    deltas: AsyncGenerator[TranscriptDelta, None], body: TranscriptionFields
) -> AsyncGenerator[BaseModel, None]:
    """Text after each window, segments if the format is verbose, the whole text at the end."""
    seen: list[TranscriptDelta] = []
    async with aclosing(deltas) as stream:
        async for delta in stream:
            seen.append(delta)
            if delta.text:
                yield text_delta(delta, has_logprobs=bool(body.include))
            if body.response_format == "verbose_json":
                for segment in delta.segments:
                    yield TextSegment.of(segment)
    yield text_done(gather(seen), has_logprobs=bool(body.include))
