"""Anthropic's API: messages, the count of their tokens, and the models that answer them.

Owns the routes. A body is translated to a chat request, and its deltas to Anthropic's events.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.context import Context
from triptych.core.http.data_urls import DataUrlRoute, FilePlace
from triptych.core.http.sse import EventStream, described
from triptych.modalities.llm.api.anthropic.conversation import chat_fields, chat_names
from triptych.modalities.llm.api.anthropic.dialect import (
    ANTHROPIC_ERRORS,
    PREFIX,
    AnthropicError,
    check_version,
)
from triptych.modalities.llm.api.anthropic.models import model_routes
from triptych.modalities.llm.api.anthropic.protocol import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from triptych.modalities.llm.api.anthropic.replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageEnd,
    MessageFormatter,
    MessageReply,
    MessageStart,
    MessageStop,
    Ping,
    TokenCount,
    whole_message,
)
from triptych.modalities.llm.api.generation import (
    begin,
    encode_conversation,
    note_reasoning,
)
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.translation import rename_errors, translate
from triptych.modalities.modality import FindLink, no_link

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_BLOCKS = ("messages", "content")
_EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageEnd, MessageStop, Ping)
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "model": MessageReply,
        "content": described(*_EVENTS, error=AnthropicError),
        "description": "The answer.",
    }
}


class _MessagesRoute(DataUrlRoute):
    """A route whose images follow their media type or the type of their source."""

    place = FilePlace(
        re.compile(
            rb'"(?:media_type"\s{0,8}:\s{0,8}"image\\?/\w{1,16}|type"\s{0,8}:\s{0,8}"base64)"'
            rb'\s{0,64},\s{0,64}"data"\s{0,8}:\s{0,8}"'
        ),
        images=frozenset({(*_BLOCKS, "source", "data"), (*_BLOCKS, "content", "source", "data")}),
        field="data",
        least=512,
    )


def anthropic_router(service: LlmService, find_link: FindLink = no_link) -> APIRouter:
    """Routes of Anthropic's API in front of `service`."""
    router = APIRouter(route_class=_MessagesRoute, responses=ANTHROPIC_ERRORS, tags=["text"])

    async def encoded(
        body: ConversationFields, request: Request
    ) -> tuple[ChatRequest, TokenRequest]:
        check_version(request)
        if body.thinking and body.thinking.type == "enabled":
            note_reasoning(request, service.model(body.model), ["thinking"])
        chat = await translate(request, partial(chat_fields, body))
        return chat, await encode_conversation(service, chat, request, find_link)

    @router.post(PREFIX, response_model=None, responses=_STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        context = Context.of(request)
        with rename_errors(chat_names(body)):
            chat, prompt = await encoded(body, request)
            length = service.model(body.model).context_length
            generation = await begin(service, chat, context, [prompt], context_length=length)
        is_cut = len(prompt.prompt_ids) + body.max_tokens > length
        formatter = MessageFormatter(
            body.model, context.call_id, reasoning=body.shown_reasoning, is_cut=is_cut
        )
        events = formatter.events(generation)
        if body.stream:
            heartbeat_s = context.options.heartbeat_s
            return EventStream(
                events, heartbeat_s=heartbeat_s, end=b"", heartbeat=PING, is_named=True
            )
        reply = await whole_message(events)
        return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")

    @router.post(f"{PREFIX}/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request) -> TokenCount:
        """Count the prompt tokens of a conversation."""
        with rename_errors(chat_names(body)):
            _, prompt = await encoded(body, request)
        return TokenCount(input_tokens=len(prompt.prompt_ids))

    router.include_router(model_routes(service.models, service.model))
    return router
