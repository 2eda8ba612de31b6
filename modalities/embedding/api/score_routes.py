"""`/v1/rerank` and `/v1/score`: scoring how well texts match.

Owns the fields and answers of both: rerank in the format of Jina and Cohere or of Text Embeddings
Inference, score in vLLM's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from triptych.core.errors import InvalidRequest
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import (
    InputText,
    RefusedField,
    Refusing,
    Strict,
)
from triptych.core.limits import MAX_INSTRUCTION_CHARS, MAX_PROMPT_TOKENS, MAX_SCORED_PAIRS
from triptych.modalities.embedding.api.protocol import OF_TEXTS, SCORES, TextFields
from triptych.modalities.embedding.api.service import EmbeddingService, ScoreCall
from triptych.modalities.embedding.api.tei import TeiRankedText, TeiRerankRequest, rank_texts

REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        **OF_TEXTS,
        "chat_template_kwargs": RefusedField("write the texts as the model reads them.", ({},)),
        "max_chunks_per_doc": RefusedField("a document is not divided: send its parts.", (1,)),
        "max_tokens_per_query": RefusedField("shorten the query.", (0,)),
        "rank_fields": RefusedField("a document is a text, or has one.", ([], ["text"])),
    }
)


class TextDocument(Strict):
    """A document as an object."""

    text: InputText


def _document_kind(value: Any) -> str:
    return ":text" if isinstance(value, str) else ":object"


Document = Annotated[
    Annotated[InputText, Tag(":text")] | Annotated[TextDocument, Tag(":object")],
    Discriminator(_document_kind),
]
_Many = Field(min_length=1, max_length=MAX_SCORED_PAIRS, fail_fast=True)
OneOrMany = Annotated[
    Annotated[InputText, Tag(":text")] | Annotated[list[InputText], _Many, Tag(":texts")],
    Discriminator(lambda value: ":texts" if isinstance(value, list) else ":text"),
]


@dataclass(frozen=True, slots=True)
class _Side:
    """The texts of one side of pairs, and the name of their request field."""

    name: str
    texts: list[str]


class _ScoreFields(TextFields, Refusing):
    """The fields of both routes."""

    refused = REFUSED
    tasks = SCORES

    use_activation: bool = Field(
        default=True, description="`false`: a cross-encoder's scores before the sigmoid."
    )
    instruction: str = Field(
        default="",
        max_length=MAX_INSTRUCTION_CHARS,
        description="What makes a document relevant, for a model that judges by a prompt.",
    )
    max_tokens_per_doc: int = Field(
        default=0,
        ge=0,
        le=MAX_PROMPT_TOKENS,
        description="Truncate longer documents to this many tokens.",
    )


class RerankRequest(_ScoreFields):
    """Documents to rank for a query."""

    query: Document
    documents: Annotated[list[Document], _Many]
    top_n: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PROMPT_TOKENS,
        description="How many of the best to return; 0: all.",
    )
    return_documents: bool | None = Field(
        default=None, description="Return the documents' texts: default true, at /v2/rerank false."
    )


_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


class ScoreRequest(_ScoreFields):
    """Texts to compare: one with one or many, or in pairs. Each side has several field names."""

    text_1: OneOrMany | None = None
    queries: OneOrMany | None = Field(default=None, description="As text_1.")
    data_1: OneOrMany | None = Field(default=None, description="As text_1.")
    text_2: OneOrMany | None = None
    documents: OneOrMany | None = Field(default=None, description="As text_2.")
    items: OneOrMany | None = Field(default=None, description="As text_2.")
    data_2: OneOrMany | None = Field(default=None, description="As text_2.")

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        first, second = self.first, self.second
        if len(first.texts) not in (1, len(second.texts)):
            raise InvalidRequest(
                f"{first.name} has {len(first.texts)} texts and {second.name}"
                f" {len(second.texts)}: send equal numbers, or one in {first.name}.",
                param=first.name,
            )
        return self

    @property
    def first(self) -> _Side:
        """The first texts."""
        return self._side(_FIRST)

    @property
    def second(self) -> _Side:
        """The second texts."""
        return self._side(_SECOND)

    def _side(self, names: Sequence[str]) -> _Side:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"Send one of {', '.join(names)}.", param=given[1] if given else names[0]
            )
        texts: str | list[str] = getattr(self, given[0])
        return _Side(given[0], [texts] if isinstance(texts, str) else texts)


def _rerank_kind(value: Any) -> str:
    has_texts = isinstance(value, dict) and "texts" in value and "documents" not in value
    return ":texts" if has_texts else ":documents"


AnyRerankRequest = Annotated[
    Annotated[RerankRequest, Tag(":documents")] | Annotated[TeiRerankRequest, Tag(":texts")],
    Discriminator(_rerank_kind),
]


class ScoreUsage(BaseModel):
    """The tokens processed."""

    prompt_tokens: int
    total_tokens: int


class RankedDocument(BaseModel):
    """A document's index in the request, and its relevance to the query."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


class RerankReply(BaseModel):
    """Answer of `/v1/rerank`, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoreUsage


class PairScore(BaseModel):
    """The score of a pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreReply(BaseModel):
    """Answer of `/v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: ScoreUsage


def score_router(service: EmbeddingService) -> APIRouter:
    """The routes of `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/v1/rerank", response_model_exclude_none=True)
    @router.post("/rerank", response_model_exclude_none=True)
    @router.post("/v1/reranking", response_model_exclude_none=True)
    @router.post("/reranking", response_model_exclude_none=True)
    async def rerank(body: AnyRerankRequest, request: Request) -> RerankReply | list[TeiRankedText]:
        """Rank documents by relevance to a query."""
        if isinstance(body, TeiRerankRequest):
            return await rank_texts(service, body, request)
        return await _rerank(service, body, request, shows_documents=True)

    @router.post("/v2/rerank", response_model_exclude_none=True)
    async def rerank_v2(body: RerankRequest, request: Request) -> RerankReply:
        """Rank documents by relevance to a query, in Cohere's format."""
        return await _rerank(service, body, request, shows_documents=False)

    @router.post("/v1/score")
    @router.post("/score")
    async def score(body: ScoreRequest, request: Request) -> ScoreReply:
        """Score how well texts match."""
        context = Context.of(request)
        first, second = body.first, body.second
        call = _call(body, context, first.texts, second)
        scored = await service.score(call)
        return ScoreReply(
            id=f"score-{context.call_id}",
            created=int(time.time()),
            model=body.model,
            data=[PairScore(index=n, score=score) for n, score in enumerate(scored.scores)],
            usage=_usage(scored.num_tokens),
        )

    return router


async def _rerank(
    service: EmbeddingService, body: RerankRequest, request: Request, *, shows_documents: bool
) -> RerankReply:
    context = Context.of(request)
    texts = [_text(document) for document in body.documents]
    call = _call(body, context, [_text(body.query)], _Side("documents", texts))
    scored = await service.score(call)
    if body.return_documents is not None:
        shows_documents = body.return_documents
    results = [
        RankedDocument(
            index=index,
            relevance_score=value,
            document=TextDocument(text=texts[index]) if shows_documents else None,
        )
        for index, value in scored.ranking[: body.top_n or None]
    ]
    return RerankReply(
        id=f"rerank-{context.call_id}",
        model=body.model,
        results=results,
        usage=_usage(scored.num_tokens),
    )


def _call(
    body: _ScoreFields, context: Context, queries: Sequence[str], documents: _Side
) -> ScoreCall:
    return ScoreCall(
        model=body.model,
        queries=queries,
        documents=documents.texts,
        max_tokens=body.truncate_prompt_tokens,
        max_document_tokens=body.max_tokens_per_doc,
        keeps_end=body.truncation_side == "left",
        has_activation=body.use_activation,
        instruction=body.instruction,
        param=documents.name,
        caller=context.caller,
    )


def _usage(num_tokens: int) -> ScoreUsage:
    return ScoreUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def _text(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text
