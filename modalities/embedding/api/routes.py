"""`/v1/embeddings`, as OpenAI speaks it.

Owns the request's fields, the answer, and what is plugged into what on the API's side. What
surrounds every route is `core.http`'s.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from triptych.core import limits
from triptych.core.errors import UnsupportedOption
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import InputText, Label, NamesModel, NullIsAbsent, inert
from triptych.core.http.models import ModelCard
from triptych.core.weights.resolve import opening
from triptych.modalities.embedding.api.ollama import ollama_embeddings_router
from triptych.modalities.embedding.api.replies import numbers, written
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, Floats
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.llm.api.protocol import TokenIds, prompt_kind
from triptych.modalities.modality import ApiPart, ApiSetup

_Batch = Field(min_length=1, max_length=limits.MAX_EMBEDDING_INPUTS, fail_fast=True)
Input = Annotated[
    Annotated[InputText, Tag(":text")]
    | Annotated[list[InputText], _Batch, Tag(":texts")]
    | Annotated[TokenIds, Tag(":tokens")]
    | Annotated[list[TokenIds], _Batch, Tag(":token-lists")],
    Discriminator(prompt_kind),
]


class EmbeddingsRequest(NamesModel, NullIsAbsent):
    """Texts to be turned into vectors."""

    tasks = ("embedding", "chat")

    input: Input = Field(description="A text, texts, token ids, or lists of token ids.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1, le=limits.MAX_DIMENSIONS)
    truncate_prompt_tokens: int = Field(
        default=0,
        ge=-1,
        le=limits.MAX_PROMPT_TOKENS,
        description="Cut longer texts to so many tokens; -1: to what the model takes, 0: refuse.",
    )
    prompt_name: Label = Field(default="", description="One of the model's own instructions.")
    user: Label | None = inert("user")

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        if self.token_ids and (self.truncate_prompt_tokens or self.prompt_name):
            raise UnsupportedOption(
                "prompt_name and truncate_prompt_tokens are for texts, not for token ids.",
                param="input",
            )
        return self

    @property
    def texts(self) -> list[str]:
        """The texts, if that is what was sent."""
        given: Any = [self.input] if isinstance(self.input, str) else self.input
        return [text for text in given if isinstance(text, str)]

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids, if that is what was sent."""
        given: Any = [] if isinstance(self.input, str) else self.input
        is_one = bool(given) and isinstance(given[0], int)
        return [ids for ids in ([given] if is_one else given) if isinstance(ids, list)]


class Embedding(BaseModel):
    """One text's vector: numbers, numbers per token where nothing is pooled, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | list[list[float]] | str


class EmbeddingUsage(BaseModel):
    """What was read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """Answer of `/v1/embeddings`, in the order of the input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def open_api(setup: ApiSetup) -> ApiPart:
    """Embeddings of encoders, and of chat models, whose states are pooled."""
    own = [model.name for model in setup.models["embedding"]]
    able = [*setup.models["embedding"], *setup.models["chat"]]
    opened = [opening(model, EmbeddingModel.open, setup.config.models) for model in able]
    service = EmbeddingService.from_config(
        setup.config, opened, setup.client, admission=setup.admission
    )
    cards = [card for card in embedding_cards(service) if card.id in own]
    routers = [
        embeddings_router(service),
        score_router(service),
        ollama_embeddings_router(service),
    ]
    return ApiPart(routers, cards)


def embeddings_router(service: EmbeddingService) -> APIRouter:
    """The route in front of `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/v1/embeddings", response_model=EmbeddingsReply)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Turn texts into vectors."""
        call = EmbedCall(
            model=body.model,
            texts=body.texts,
            token_ids=body.token_ids,
            dimensions=body.dimensions or 0,
            prompt_name=body.prompt_name,
            max_tokens=body.truncate_prompt_tokens,
            caller=Context.of(request).caller,
        )
        embedded = await service.embed(call)
        usage = EmbeddingUsage(prompt_tokens=embedded.num_tokens, total_tokens=embedded.num_tokens)
        reply = EmbeddingsReply(data=[], model=body.model, usage=usage)

        def entry(index: int, vector: Floats) -> dict[str, Any]:
            shown = _base64(vector) if body.encoding_format == "base64" else numbers(vector)
            return {**Embedding(index=index, embedding="").model_dump(), "embedding": shown}

        return await written(reply, "data", embedded.vectors, entry)

    return router


def embedding_cards(service: EmbeddingService) -> list[ModelCard]:
    """What `/v1/models` says of the service's models."""
    return [
        ModelCard(
            id=model.name,
            task="rerank" if model.is_cross_encoder else "embedding",
            max_model_len=model.max_length,
        )
        for model in service.models.values()
    ]


def _base64(vector: Floats) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
