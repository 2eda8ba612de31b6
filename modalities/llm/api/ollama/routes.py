"""Ollama's API: chat, generate, and the models there are.

Owns the routes of text models and the list of all models. A body is translated to a chat request,
and its deltas to Ollama's lines.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.http.context import Context
from triptych.core.http.data_urls import DataUrlRoute, FilePlace
from triptych.core.http.engine_models import check_is_admin
from triptych.core.http.refused_routes import add_refused_routes
from triptych.core.http.sse import LineStream, described_lines
from triptych.modalities.llm.api.generation import begin, encode_conversation, ending_gap
from triptych.modalities.llm.api.ollama import unsupported
from triptych.modalities.llm.api.ollama.conversation import (
    CHAT_NAMES,
    GENERATE_NAMES,
    chat_fields,
    generate_fields,
)
from triptych.modalities.llm.api.ollama.dialect import (
    OLLAMA_ERRORS,
    OllamaError,
    OllamaRoute,
    keep_model,
)
from triptych.modalities.llm.api.ollama.library import add_library
from triptych.modalities.llm.api.ollama.models import (
    Catalogue,
    ListedModels,
    ShownModel,
)
from triptych.modalities.llm.api.ollama.protocol import (
    AnswerFields,
    GenerateRequest,
    OllamaChatRequest,
    OllamaOptions,
    ShowRequest,
)
from triptych.modalities.llm.api.ollama.replies import (
    ChatLine,
    ChatLines,
    GenerateLine,
    GenerateLines,
    OllamaFormatter,
    Timing,
)
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.service import LlmService
from triptych.modalities.llm.api.translation import check_has_reasoning, rename_errors, translate
from triptych.modalities.modality import FindLink, no_link

_VERSION = "0.13.0"
"""The version of the API: clients refuse servers that are too old."""


class VersionReply(BaseModel):
    """Answer of `/api/version`."""

    version: str


class _ImagesRoute(OllamaRoute, DataUrlRoute):
    """A route whose images are in lists called `images`."""

    place = FilePlace(
        re.compile(rb'"images"\s{0,8}:\s{0,8}\[\s{0,64}"'),
        images=frozenset({("messages", "images"), ("images",)}),
        field="images",
        following=re.compile(rb'"\s{0,64},\s{0,64}"'),
        least=512,
    )


def ollama_router(
    service: LlmService, catalogue: Catalogue, find_link: FindLink = no_link
) -> APIRouter:
    """Routes of Ollama's API in front of `service`, and the list of the models."""
    router = APIRouter(responses=OLLAMA_ERRORS, tags=["text"])
    routes = _TextRoutes(service, catalogue, find_link)
    for path, answer, kind in (
        ("/api/chat", routes.chat, ChatLine),
        ("/api/generate", routes.generate, GenerateLine),
    ):
        router.add_api_route(
            path,
            answer,
            methods=["POST"],
            response_model=None,
            responses={
                200: {
                    "model": kind,
                    "content": described_lines(kind, OllamaError),
                    "description": "The answer.",
                }
            },
            route_class_override=_ImagesRoute,
        )
    _add_models(router, catalogue)
    add_library(router, catalogue)
    add_refused_routes(router, unsupported.ROUTES)
    _add_greeting(router)
    return router


@dataclass(frozen=True, slots=True)
class _TextRoutes:
    """Answers chat and generate."""

    service: LlmService
    catalogue: Catalogue
    find_link: FindLink

    async def chat(self, body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation, or load a model."""
        model = self._model(body)
        if not body.messages:
            return await self._load(body, model, ChatLines, request)
        with rename_errors(CHAT_NAMES):
            chat = await translate(request, partial(chat_fields, body, model))
            prompt = await encode_conversation(self.service, chat, request, self.find_link)
            return await self._answer(body, chat, prompt, ChatLines, request)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        """Answer or continue a prompt, or load a model."""
        model = self._model(body)
        if not (body.prompt or body.images):
            return await self._load(body, model, GenerateLines, request)
        with rename_errors(GENERATE_NAMES):
            chat = await translate(request, partial(generate_fields, body, model))
            if body.suffix:
                tenant = Context.of(request).principal.tenant
                ids = await self.service.encode_gap(model, body.prompt or "", body.suffix)
                prompt = TokenRequest(prompt_ids=ids, tenant=tenant)
                chat = ending_gap(chat, self.service.model(model))
            elif body.raw:
                tenant = Context.of(request).principal.tenant
                ids = await self.service.encode_text(model, body.prompt or "", parse_special=True)
                prompt = TokenRequest(prompt_ids=ids, tenant=tenant)
            else:
                prompt = await encode_conversation(self.service, chat, request, self.find_link)
                ids = (*(body.context or ()), *prompt.prompt_ids)
                prompt = msgspec.structs.replace(prompt, prompt_ids=ids)
            return await self._answer(body, chat, prompt, GenerateLines, request)

    def _model(self, body: AnswerFields) -> str:
        """The served name of the model. Raises `InvalidRequest` if it cannot reason as asked."""
        model = self.catalogue.name(body.model)
        if body.think:
            check_has_reasoning(self.service.model(model), "think")
        return model

    async def _load(
        self, body: AnswerFields, model: str, kind: type[OllamaFormatter], request: Request
    ) -> Response:
        """Load a model that writes text, or unload any; unloading is for `check_is_admin`."""
        if body.keep_s == 0:
            check_is_admin(request)
            await self.service.client.unload(model)
            timing = Timing(Context.of(request).arrived_s, 0.0)
            return _document(kind(body.model, timing).empty("unload"))
        self.service.model(model)
        await keep_model(request, body, self.service.client, model)
        timing = await self._timing(model, request)
        return _document(kind(body.model, timing).empty("load"))

    async def _answer(
        self,
        body: AnswerFields,
        chat: ChatRequest,
        prompt: TokenRequest,
        kind: type[OllamaFormatter],
        request: Request,
    ) -> Response:
        options = body.options or OllamaOptions()
        end = await keep_model(request, body, self.service.client, chat.model)
        length = options.num_ctx or self.service.model(chat.model).context_length
        generation = await begin(
            self.service, chat, Context.of(request), [prompt], context_length=length
        )
        timing = await self._timing(chat.model, request)
        has_context = isinstance(body, GenerateRequest) and not body.raw and not prompt.contents
        formatter = kind(
            body.model,
            timing,
            shows_reasoning=body.think is not False,
            context=prompt.prompt_ids if has_context else None,
        )
        if body.is_streamed:
            return LineStream(_then(formatter.lines(generation), end))
        try:
            return _document(await formatter.whole(generation))
        finally:
            end()

    async def _timing(self, model: str, request: Request) -> Timing:
        """The times of a request, once its model is loaded."""
        return Timing(Context.of(request).arrived_s, await self.service.ready(model))


async def _then(
    lines: AsyncGenerator[BaseModel, None], end: Callable[[], None]
) -> AsyncGenerator[BaseModel, None]:
    """Yield the lines, and call `end` after the last."""
    try:
        async with aclosing(lines):
            async for line in lines:
                yield line
    finally:
        end()


def _document(reply: BaseModel) -> Response:
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")


def _add_models(router: APIRouter, catalogue: Catalogue) -> None:
    @router.get("/api/tags", response_model_exclude_unset=True)
    async def tags() -> ListedModels:
        """List the served models."""
        return await catalogue.list_all()

    @router.get("/api/ps", response_model_exclude_unset=True)
    async def loaded() -> ListedModels:
        """List the models in memory."""
        return await catalogue.list_loaded()

    @router.get("/api/version")
    async def version() -> VersionReply:
        """Return the version of this API."""
        return VersionReply(version=_VERSION)

    async def show(body: ShowRequest) -> ShownModel:
        """Show one model."""
        return await catalogue.show(body.requested_name)

    router.add_api_route("/api/show", show, methods=["POST"], route_class_override=OllamaRoute)


class _GreetingRoute(APIRoute):
    """A route that browsers do not match, since they get the page at its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as any route does, except requests for a page."""
        if "text/html" in Headers(scope=scope).get("accept", ""):
            return Match.NONE, {}
        return super().matches(scope)


def _add_greeting(router: APIRouter) -> None:
    """Add the route that Ollama's clients probe before other requests."""

    async def greet() -> Response:
        headers = {"cache-control": "no-store", "vary": "accept"}
        return Response("Ollama is running", media_type="text/plain", headers=headers)

    router.add_api_route(
        "/", greet, methods=["GET"], include_in_schema=False, route_class_override=_GreetingRoute
    )
