"""Vectors and ranks for clients of Text Embeddings Inference: `/embed`, `/similarity`, `/rerank`.

Owns the fields and answers of all three. `/rerank` is where other clients have their own: its
route is `score_routes`'. These clients name no model; where one is named, that is taken.
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
from triptych.modalities.embedding.api.replies import numbers, written
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, ScoreCall
from triptych.modalities.llm.api.translation import rename_errors

_NAMES = MappingProxyType(
    {"input": "inputs", "use_activation": "raw_scores", "truncate_prompt_tokens to -1": "truncate"}
)
"""What these clients call the fields that errors name."""
_Texts = Annotated[
    list[InputText], Field(min_length=1, max_length=limits.MAX_SCORED_PAIRS, fail_fast=True)
]


class _CutFields(NullIsAbsent):
    """How texts that are too long are cut."""

    truncate: bool = Field(default=False, description="Cut texts to what the model takes.")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field(
        default="Right", description="The end that is cut off."
    )

    @property
    def max_tokens(self) -> int:
        """As in a call of the service."""
        return -1 if self.truncate else 0

    @property
    def keeps_end(self) -> bool:
        """As in a call of the service."""
        return self.truncation_direction in ("Left", "left")


class TeiEmbedRequest(NamesModel, _CutFields):
    """Texts to be turned into vectors."""

    tasks = EMBEDS

    inputs: Input
    normalize: bool = Field(default=True, description="Whether vectors are of length one.")
    dimensions: int | None = Field(default=None, ge=1, le=limits.MAX_DIMENSIONS)
    prompt_name: Label = Field(default="", description="One of the model's own instructions.")


class ComparedTexts(NullIsAbsent):
    """A sentence, and those that it is compared with."""

    source_sentence: InputText
    sentences: _Texts


class SimilarityRequest(NamesModel, NullIsAbsent):
    """Sentences to be compared."""

    tasks = EMBEDS

    inputs: ComparedTexts
    parameters: _CutFields = _CutFields()


class TeiRerankRequest(NamesModel, _CutFields):
    """Texts to be put in order."""

    tasks = SCORES

    query: InputText
    texts: _Texts
    raw_scores: bool = Field(
        default=False, description="`true`: a cross-encoder's scores before the sigmoid."
    )
    return_text: bool = Field(default=False, description="Return the texts, too.")
    top_n: int | None = Field(
        default=None,
        ge=0,
        le=limits.MAX_PROMPT_TOKENS,
        description="How many of the best to return, as in llama.cpp; 0: all.",
    )


class TeiRankedText(BaseModel):
    """A text by its place in the request, and how well it matches the query."""

    index: int
    score: float
    text: str | None = None


def tei_router(service: EmbeddingService) -> APIRouter:
    """The routes in front of `service` that are these clients' alone."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/embed", response_model=list[list[float] | list[list[float]]])
    async def embed(body: TeiEmbedRequest, request: Request) -> Response:
        """Turn texts into vectors."""
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
        return await written(vectors, lambda: [*map(numbers, vectors)])

    @router.post("/similarity")
    async def similarity(body: SimilarityRequest, request: Request) -> list[float]:
        """Compare a sentence with others."""
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
    """Put texts in order of how well they match a query."""
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
