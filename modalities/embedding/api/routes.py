"""`/v1/embeddings`, in OpenAI's format.

Owns the answer, and the assembly of the API side. `protocol` has the request's fields; `core.http`
has the code around every route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.errors import UnsupportedOption
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.models import ModelCard
from triptych.core.options.declaration import Role
from triptych.core.weights.resolve import ResolvedModel, open_resolved
from triptych.modalities.embedding.api.cohere import cohere_router
from triptych.modalities.embedding.api.ollama import ollama_embeddings_router
from triptych.modalities.embedding.api.protocol import EmbeddingsRequest
from triptych.modalities.embedding.api.replies import json_response, numbers, to_base64
from triptych.modalities.embedding.api.score_routes import score_router
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, Floats, TextOrIds
from triptych.modalities.embedding.api.tei import tei_router
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.llm.api.generation import for_template
from triptych.modalities.llm.api.tools.schema import ToolSet
from triptych.modalities.modality import ApiPart, ApiSetup, EncodeChat, OpenedModel


class Embedding(BaseModel):
    """One text's vector: numbers, numbers per token without pooling, or base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | list[list[float]] | str


class EmbeddingUsage(BaseModel):
    """The tokens processed."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(BaseModel):
    """Answer of `/v1/embeddings`, in the order of the input."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def open_api(setup: ApiSetup) -> ApiPart:
    """The API of encoders, and of chat models, whose states are pooled."""
    own = [model.name for model in setup.models["embedding"]]
    able = [*setup.models["embedding"], *setup.models["chat"]]
    opened = [open_resolved(model, EmbeddingModel.open, setup.config.models) for model in able]
    service = EmbeddingService.from_config(
        setup.config, opened, setup.client, admission=setup.admission
    )
    cards = [card for card in embedding_cards(service) if card.id in own]
    routers = [
        embeddings_router(service, lambda: setup.encode_chat),
        score_router(service),
        cohere_router(service),
        tei_router(service),
        ollama_embeddings_router(service),
    ]

    def open_model(model: ResolvedModel, role: Role) -> OpenedModel | None:
        if role not in ("embedding", "chat"):
            return None
        text = open_resolved(model, EmbeddingModel.open, setup.config.models)
        card = embedding_card(text) if role == "embedding" else None
        return OpenedModel(join=partial(service.add, text), card=card)

    return ApiPart(routers, cards, open_model=open_model, drop_model=service.remove)


def embeddings_router(
    service: EmbeddingService, find_chat: Callable[[], EncodeChat | None] = lambda: None
) -> APIRouter:
    """The route of `service`; `find_chat` returns the encoder of conversations, if any."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/v1/embeddings", response_model=EmbeddingsReply)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        """Embed texts as vectors."""
        inputs: Sequence[TextOrIds] = body.inputs
        if body.messages is not None:
            inputs = [await _encoded(service, body, request, find_chat())]
        call = EmbedCall(
            model=body.model,
            inputs=inputs,
            dimensions=body.dimensions or 0,
            prompt_name=body.prompt_name,
            max_tokens=body.truncate_prompt_tokens,
            keeps_end=body.truncation_side == "left",
            caller=Context.of(request).caller,
        )
        embedded = await service.embed(call)
        usage = EmbeddingUsage(prompt_tokens=embedded.num_tokens, total_tokens=embedded.num_tokens)
        reply = EmbeddingsReply(data=[], model=body.model, usage=usage).model_dump()

        def entry(index: int, vector: Floats) -> dict[str, Any]:
            shown = to_base64(vector) if body.encoding_format == "base64" else numbers(vector)
            return {**Embedding(index=index, embedding="").model_dump(), "embedding": shown}

        return await json_response(
            embedded.vectors,
            lambda: {**reply, "data": [entry(*each) for each in enumerate(embedded.vectors)]},
        )

    return router


async def _encoded(
    service: EmbeddingService,
    body: EmbeddingsRequest,
    request: Request,
    encode: EncodeChat | None,
) -> tuple[int, ...]:
    """The token ids of a conversation."""
    if encode is None or not service.model(body.model).is_causal:
        raise UnsupportedOption(
            f"{body.model} has no chat template: send texts as input.", param="messages"
        )
    messages, _ = await for_template(request, body.messages or (), ToolSet.of((), None))
    prompt = await encode(body.model, messages, **body.template_options())
    return prompt.prompt_ids


def embedding_cards(service: EmbeddingService) -> list[ModelCard]:
    """The entries of the service's models in `/v1/models`."""
    return list(map(embedding_card, service.models.values()))


def embedding_card(model: EmbeddingModel) -> ModelCard:
    """The entry of a model in `/v1/models`."""
    return ModelCard(
        id=model.name,
        task="rerank" if model.scores_pairs else "embedding",
        max_model_len=model.max_length,
    )
