"""Embeddings for Ollama's clients: `/api/embed`, and `/api/embeddings` for older ones.

Owns the requests' fields and the answers. The LLM modality has the code common to Ollama's API.
"""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag
from starlette.responses import Response

from triptych.core import limits
from triptych.core.errors import UnsupportedOption
from triptych.core.http.context import Context
from triptych.core.http.fields import InputText
from triptych.core.http.model_names import without_tag
from triptych.modalities.embedding.api.replies import json_response, numbers
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, EmbedResult
from triptych.modalities.llm.api.messages import is_list
from triptych.modalities.llm.api.ollama.dialect import (
    OLLAMA_ERRORS,
    OllamaRoute,
    keep_model,
    nanoseconds,
)
from triptych.modalities.llm.api.ollama.protocol import OllamaRequest
from triptych.modalities.llm.api.translation import rename_errors

_Texts = Annotated[
    list[InputText], Field(min_length=1, max_length=limits.MAX_EMBEDDING_INPUTS, fail_fast=True)
]

_NAMES = MappingProxyType(
    {
        "truncate_prompt_tokens to -1": "truncate to true",
        "truncate_prompt_tokens": "options.num_ctx",
    }
)
"""Ollama's names of the fields in errors."""


class EmbedBody(OllamaRequest):
    """Body of `/api/embed`. Sampling options have no effect; `num_ctx` truncates texts."""

    input: Annotated[
        Annotated[InputText, Tag(":text")] | Annotated[_Texts, Tag(":list")],
        Discriminator(is_list),
    ]
    truncate: bool | None = Field(
        default=None, description="Truncate texts that are too long, which is the default."
    )
    dimensions: Annotated[int, Field(ge=1, le=limits.MAX_DIMENSIONS)] | None = None

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input


class EmbeddingsBody(OllamaRequest):
    """Body of `/api/embeddings`."""

    prompt: InputText


class VectorsReply(BaseModel):
    """Answer of `/api/embed`, in the order of the texts."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class VectorReply(BaseModel):
    """Answer of `/api/embeddings`."""

    embedding: list[float]


def ollama_embeddings_router(service: EmbeddingService) -> APIRouter:
    """The routes of `service`."""
    router = APIRouter(route_class=OllamaRoute, responses=OLLAMA_ERRORS, tags=["text"])

    @router.post("/api/embed", response_model=VectorsReply)
    async def embed(body: EmbedBody, request: Request) -> Response:
        """Embed texts as vectors."""
        dimensions, cuts = body.dimensions or 0, body.truncate is not False
        call = _call(service, body, request, texts=body.texts, dimensions=dimensions, cuts=cuts)
        load_s = await service.ready(call.model)
        embedded = await _embed(service, call, body, request)
        reply = VectorsReply(
            model=body.model,
            embeddings=[],
            total_duration=nanoseconds(time.monotonic() - Context.of(request).arrived_s),
            load_duration=nanoseconds(load_s),
            prompt_eval_count=embedded.num_tokens,
        )
        return await json_response(
            embedded.vectors,
            lambda: {**reply.model_dump(), "embeddings": [*map(numbers, embedded.vectors)]},
        )

    @router.post("/api/embeddings")
    async def embeddings(body: EmbeddingsBody, request: Request) -> VectorReply:
        """Embed a text."""
        call = _call(service, body, request, texts=[body.prompt])
        (vector,) = (await _embed(service, call, body, request)).vectors
        return VectorReply(embedding=vector.tolist())

    return router


async def _embed(
    service: EmbeddingService, call: EmbedCall, body: OllamaRequest, request: Request
) -> EmbedResult:
    """Embed the texts of a call, and then do what `keep_alive` says."""
    end = await keep_model(request, body, service.client, call.model)
    try:
        with rename_errors(_NAMES):
            return await service.embed(call)
    finally:
        end()


def _call(
    service: EmbeddingService,
    body: OllamaRequest,
    request: Request,
    *,
    texts: list[str],
    dimensions: int = 0,
    cuts: bool = True,
) -> EmbedCall:
    """The call for `body`. Raises `UnknownModel` or `UnsupportedOption`."""
    if not service.pools:
        raise UnsupportedOption(
            "Ollama's API returns one vector per text, but with --no-pool-embeddings there is one"
            " per token: use /v1/embeddings."
        )
    model = service.model(without_tag(body.model, service.models))
    num_ctx = body.options.num_ctx if body.options else None
    return EmbedCall(
        model=model.name,
        inputs=texts,
        dimensions=dimensions,
        max_tokens=min(num_ctx or model.max_length, model.max_length) if cuts else 0,
        caller=Context.of(request).caller,
    )
