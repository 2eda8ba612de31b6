"""The OpenAI text API: chat and completions.

Owns the way from a validated request to a call of the service and from its deltas to an answer, and
the composition of this modality's API. Keys, limits, errors and disconnects are `core.http`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.body import StrictRoute, note_ignored
from triptych.core.http.context import Context
from triptych.core.http.data_urls import DataUrlRoute
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.json_writer import write_json
from triptych.core.http.refused_routes import add_refused_routes
from triptych.core.http.sse import EventStream, WrittenDocument, described
from triptych.core.options.config import ServerOptions
from triptych.core.options.declaration import Role
from triptych.core.text.threads import on_text_thread
from triptych.core.weights.resolve import ResolvedModel, open_resolved
from triptych.modalities.llm.api.adapter_routes import AdapterCards, add_adapters
from triptych.modalities.llm.api.anthropic.dialect import ANTHROPIC
from triptych.modalities.llm.api.anthropic.routes import anthropic_router
from triptych.modalities.llm.api.cache_routes import add_cache
from triptych.modalities.llm.api.formatters import (
    AnswerDetails,
    ChatFormatter,
    CompletionFormatter,
    ResponseFormatter,
)
from triptych.modalities.llm.api.generation import (
    Generation,
    begin,
    encode_conversation,
    ending_gap,
    note_reasoning,
    with_usage,
)
from triptych.modalities.llm.api.hearing import hear_messages
from triptych.modalities.llm.api.infill_routes import add_infill
from triptych.modalities.llm.api.ollama.dialect import OLLAMA
from triptych.modalities.llm.api.ollama.models import Catalogue
from triptych.modalities.llm.api.ollama.routes import ollama_router
from triptych.modalities.llm.api.protocol import (
    ChatRequest,
    CompletionRequest,
    TextRequest,
)
from triptych.modalities.llm.api.replies import (
    ChatChunk,
    ChatReply,
    Chunk,
    CompletionReply,
    UsageReply,
    card_of,
)
from triptych.modalities.llm.api.responses.answering import Answering
from triptych.modalities.llm.api.responses.conversations import conversations_router
from triptych.modalities.llm.api.responses.replies import InputTokens
from triptych.modalities.llm.api.responses.routes import responses_router
from triptych.modalities.llm.api.samples import SampleDelta
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.speaking import AnswerVoice, SpokenChat, SpokenFormatter
from triptych.modalities.llm.api.text import TextModel
from triptych.modalities.llm.api.tokenizer_routes import add_tokenizer, encode_prompt
from triptych.modalities.llm.api.unsupported import ROUTES
from triptych.modalities.modality import ApiPart, ApiSetup, FindLink, OpenedModel, no_link

_LISTED: tuple[Role, ...] = ("chat", "vision", "embedding")
"""The roles of models that clients of Ollama can use."""


def open_api(setup: ApiSetup) -> ApiPart:
    """The API of all text models, including those with image encoders."""
    encoders = setup.prompt_encoders
    texts = [
        open_resolved(model, TextModel.open, setup.config.models) for model in setup.models["chat"]
    ]
    texts += [encoder.text for encoder in encoders.values()]
    service = LlmService.from_config(
        setup.config,
        texts,
        setup.client,
        encoders=encoders,
        admission=setup.admission,
        taken={model.name for models in setup.models.values() for model in models},
    )
    setup.exit_stack.push_async_callback(service.close)
    setup.encode_chat = service.encode_chat
    cards = [card_of(text, sees=text.name in encoders) for text in texts]
    listed = [model for role in _LISTED for model in setup.models[role]]
    catalogue = Catalogue(listed, service)
    has_info = setup.config.server.enable_tokenizer_info_endpoint
    routers = [
        llm_router(service, setup.find_link, has_tokenizer_info=has_info),
        anthropic_router(service, setup.find_link),
        ollama_router(service, catalogue, setup.find_link),
        *_responses(service, setup),
    ]

    def open_model(model: ResolvedModel, role: Role) -> OpenedModel | None:
        if role not in _LISTED:
            return None
        if role == "embedding":  # it is listed for clients of Ollama alone
            return OpenedModel(join=partial(catalogue.add, model))
        if role == "vision":  # whose part comes before this one
            text = encoders[model.name].text
        else:
            text = open_resolved(model, TextModel.open, setup.config.models)

        def join() -> None:
            service.add(text)
            catalogue.add(model)

        return OpenedModel(join=join, card=card_of(text, sees=role == "vision"))

    async def drop_model(name: str) -> None:
        catalogue.remove(name)
        await service.remove(name)

    return ApiPart(
        routers,
        cards,
        [ANTHROPIC, OLLAMA],
        partial(_warm, service),
        open_model=open_model,
        drop_model=drop_model,
        more=[AdapterCards(service)],
        service=service,
    )


def _warm(service: LlmService) -> None:
    for text in service.models.values():
        text.warm()


def _responses(service: LlmService, setup: ApiSetup) -> list[APIRouter]:
    """The Responses API and its store."""
    answering = Answering.open(service, setup.store, setup.config.server, setup.find_link)
    setup.exit_stack.push_async_callback(answering.runs.close)
    return [responses_router(answering), conversations_router(answering)]


def llm_router(
    service: LlmService, find_link: FindLink = no_link, *, has_tokenizer_info: bool = False
) -> APIRouter:
    """Routes of the text API in front of `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])
    add_generation(router, service, find_link)
    add_infill(router, service)
    add_tokenizer(router, service, has_info=has_tokenizer_info)
    add_cache(router, service)
    if service.adapters is not None:
        add_adapters(router, service.adapters)
    add_refused_routes(router, ROUTES)
    return router


def add_generation(router: APIRouter, service: LlmService, find_link: FindLink) -> None:
    """Add the routes of chat and completions."""

    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, with images for vision models."""
        context = Context.of(request)
        body = with_usage(body, context.options)
        model = service.model(body.model)
        voice = await AnswerVoice.of(service, body, context.caller)
        if voice is not None and voice.is_replaced:
            note_ignored(request, "voice")
        note_reasoning(request, model, body.thinking_fields)
        heard, num_heard = await hear_messages(service, body, request)
        prompt = await encode_conversation(service, heard, request, find_link)
        generation = await begin(service, heard, context, [prompt])
        generation.usage.num_heard_tokens = num_heard
        details = AnswerDetails.of(body)
        if voice is not None:
            spoken = SpokenChat(service, generation, voice, context)
            speaking = SpokenFormatter(model, context.call_id, details, spoken.answer)
            return await _spoken(spoken, body, speaking, context.options)
        formatter = ChatFormatter(model, context.call_id, details)
        return await _answer(generation, body, formatter, context.options)

    router.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        response_model=None,
        responses=_stream_responses(ChatReply, ChatChunk),
        route_class_override=DataUrlRoute,
    )

    async def count_chat_tokens(body: ChatRequest, request: Request) -> InputTokens:
        """Count the prompt tokens of a conversation."""
        heard, num_heard = await hear_messages(service, body, request)
        prompt = await encode_conversation(service, heard, request, find_link)
        return InputTokens(input_tokens=len(prompt.prompt_ids) + num_heard)

    router.add_api_route(
        "/v1/chat/completions/input_tokens",
        count_chat_tokens,
        methods=["POST"],
        route_class_override=DataUrlRoute,
    )
    _add_completions(router, service)


def _add_completions(router: APIRouter, service: LlmService) -> None:
    """Add the route of raw completions."""

    @router.post(
        "/v1/completions",
        response_model=None,
        responses=_stream_responses(CompletionReply, CompletionReply),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        context = Context.of(request)
        body = with_usage(body, context.options)
        tenant = context.principal.tenant
        prompts = [
            TokenRequest(prompt_ids=await _prompt_ids(service, body, prompt), tenant=tenant)
            for prompt in body.prompts
        ]
        model = service.model(body.model)
        formatter = CompletionFormatter(model, context.call_id, AnswerDetails.of(body))
        body = ending_gap(body, model) if body.suffix else body
        generation = await begin(service, body, context, prompts)
        return await _answer(generation, body, formatter, context.options)


def _stream_responses(
    reply: type[BaseModel], chunk: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": reply, "content": described(chunk), "description": "The answer."}}


async def _prompt_ids(
    service: LlmService, body: CompletionRequest, prompt: str | list[int]
) -> tuple[int, ...]:
    most = body.truncate_prompt_tokens
    if body.suffix:
        assert isinstance(prompt, str), "the request was checked"
        options = body.encoding_options
        return await service.encode_gap(body.model, prompt, body.suffix, **options)
    if isinstance(prompt, str):
        ids = await encode_prompt(service, body, prompt, may_exceed=most is not None)
    else:
        ids = tuple(prompt)
    if most == -1:
        num_answer = body.sampling()["max_tokens"] or body.default_tokens or 1
        most = max(1, service.model(body.model).context_length - num_answer)
    if most is None:
        return ids
    return ids[:most] if body.truncation_side == "right" else ids[-most:]


async def _answer(
    generation: Generation,
    body: TextRequest,
    formatter: ResponseFormatter,
    options: ServerOptions,
) -> Response:
    if body.stream:
        return EventStream(_documents(generation, formatter, body), heartbeat_s=options.heartbeat_s)
    samples, usage = await generation.samples(), generation.usage.total()
    # Log-probabilities of a long prompt take long to write.
    document = await on_text_thread(usage.total_tokens, _document, formatter, samples, usage)
    return Response(document, media_type="application/json")


async def _spoken(
    spoken: SpokenChat, body: ChatRequest, formatter: SpokenFormatter, options: ServerOptions
) -> Response:
    if body.stream:
        documents = spoken.documents(formatter, body)
        return EventStream(documents, heartbeat_s=options.heartbeat_s)
    reply = await spoken.reply(formatter)
    document = await asyncio.to_thread(write_json, reply)
    return Response(document, media_type="application/json")


def _document(
    formatter: ResponseFormatter, samples: list[list[SampleDelta]], usage: UsageReply
) -> bytes:
    return write_json(formatter.reply(samples, usage))


async def _documents(
    generation: Generation, formatter: ResponseFormatter, body: TextRequest
) -> AsyncGenerator[BaseModel, None]:
    usage = generation.usage
    async with aclosing(generation.deltas) as stream:
        async for delta in stream:
            running = usage.total() if body.has_running_usage else None
            if delta.prompt is not None and delta.has_echo:
                num_tokens = len(delta.prompt.token_ids)
                for written in await on_text_thread(
                    num_tokens, _written_chunks, formatter, delta, running
                ):
                    yield written
            else:
                for chunk in _chunks(formatter, delta, running):
                    yield chunk
    if body.has_usage_chunk:
        yield formatter.usage_chunk(usage.total())


def _chunks(
    formatter: ResponseFormatter, delta: SampleDelta, running: UsageReply | None
) -> Iterator[Chunk]:
    for chunk in formatter.chunks(delta):
        if running is not None:
            chunk.usage = running
        yield chunk


def _written_chunks(
    formatter: ResponseFormatter, delta: SampleDelta, running: UsageReply | None
) -> list[WrittenDocument]:
    return [
        WrittenDocument(json_line=write_json(chunk)) for chunk in _chunks(formatter, delta, running)
    ]
