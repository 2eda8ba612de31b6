"""Embeddings and ranking for clients of Text Embeddings Inference.

Owns the fields and answers of `/embed`, `/similarity` and `/rerank`. The route `/rerank` is shared
with other clients and lives in `score_routes`. These clients send no model; one that is sent is
used.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from triptych.core import limits
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import InputText, Label, NamesModel, NullIsAbsent
from triptych.modalities.embedding.api.protocol import EMBEDS, SCORES, Input, inputs_of
from triptych.modalities.embedding.api.replies import json_response, numbers
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, ScoreCall
from triptych.modalities.llm.api.translation import rename_errors

_NAMES = MappingProxyType(
    {"input": "inputs", "use_activation": "raw_scores", "truncate_prompt_tokens to -1": "truncate"}
)
"""These clients' names of the fields in errors."""
_Texts = Annotated[
    list[InputText], Field(min_length=1, max_length=limits.MAX_SCORED_PAIRS, fail_fast=True)
]


class _CutFields(NullIsAbsent):
    """How texts that are too long are truncated."""

    truncate: bool = Field(default=False, description="Truncate texts to the model's limit.")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field(
        default="Right", description="The end at which texts are truncated."
    )

    @property
    def max_tokens(self) -> int:
        """The `max_tokens` of a service call."""
        return -1 if self.truncate else 0

    @property
    def keeps_end(self) -> bool:
        """The `keeps_end` of a service call."""
        return self.truncation_direction in ("Left", "left")


class TeiEmbedRequest(NamesModel, _CutFields):
    """Texts to embed."""

    tasks = EMBEDS

    inputs: Input
    normalize: bool = Field(default=True, description="Whether vectors have length one.")
    dimensions: int | None = Field(default=None, ge=1, le=limits.MAX_DIMENSIONS)
    prompt_name: Label = Field(default="", description="The name of one of the model's prompts.")


class ComparedTexts(NullIsAbsent):
    """A sentence, and the sentences to compare it with."""

    source_sentence: InputText
    sentences: _Texts


class SimilarityRequest(NamesModel, NullIsAbsent):
    """Sentences to compare."""

    tasks = EMBEDS

    inputs: ComparedTexts
    parameters: _CutFields = _CutFields()


class TeiRerankRequest(NamesModel, _CutFields):
    """Texts to rank for a query."""

    tasks = SCORES

    query: InputText
    texts: _Texts
    raw_scores: bool = Field(
        default=False, description="`true`: a cross-encoder's scores before the sigmoid."
    )
    return_text: bool = Field(default=False, description="Also return the texts.")
    top_n: int | None = Field(
        default=None,
        ge=0,
        le=limits.MAX_PROMPT_TOKENS,
        description="How many of the best to return, as in llama.cpp; 0: all.",
    )


class TeiRankedText(BaseModel):
    """A text's index in the request, and its score for the query."""

    index: int
    score: float
    text: str | None = None


def tei_router(service: EmbeddingService) -> APIRouter:
    """The routes of `service` that only these clients use."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/embed", response_model=list[list[float] | list[list[float]]])
    async def embed(body: TeiEmbedRequest, request: Request) -> Response:
        """Embed texts as vectors."""
        call = EmbedCall(
            model=body.model,
            inputs=inputs_of(body.inputs),
            dimensions=body.dimensions or 0,
            prompt_name=body.prompt_name,
            max_tokens=body.max_tokens,
            keeps_end=body.keeps_end,
            normalizes=body.normalize,
            caller=Context.of(request).caller,
        )
        with rename_errors(_NAMES):
            vectors = (await service.embed(call)).vectors
        return await json_response(vectors, lambda: [*map(numbers, vectors)])

    @router.post("/similarity")
    async def similarity(body: SimilarityRequest, request: Request) -> list[float]:
        """Compare a sentence with other sentences."""
        call = ScoreCall(
            model=body.model,
            queries=[body.inputs.source_sentence],
            documents=body.inputs.sentences,
            max_tokens=body.parameters.max_tokens,
            keeps_end=body.parameters.keeps_end,
            param="inputs",
            caller=Context.of(request).caller,
        )
        with rename_errors(_NAMES):
            return [*(await service.score(call)).scores]

    return router


async def rank_texts(
    service: EmbeddingService, body: TeiRerankRequest, request: Request
) -> list[TeiRankedText]:
    """Rank texts by relevance to a query."""
    call = ScoreCall(
        model=body.model,
        queries=[body.query],
        documents=body.texts,
        max_tokens=body.max_tokens,
        keeps_end=body.keeps_end,
        has_activation=not body.raw_scores,
        param="texts",
        caller=Context.of(request).caller,
    )
    with rename_errors(_NAMES):
        ranking = (await service.score(call)).ranking
    shown = body.texts if body.return_text else [None] * len(body.texts)
    return [
        TeiRankedText(index=index, score=score, text=shown[index])
        for index, score in ranking[: body.top_n or None]
    ]
