"""`/v2/embed`: embeddings for Cohere's clients.

Owns the request's fields, the formats of vectors, and the answer. Cohere's rerank is in
`score_routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.body import StrictRoute, note_ignored
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import (
    InputText,
    Label,
    NamesModel,
    NullIsAbsent,
    RefusedField,
    without_refused,
)
from triptych.modalities.embedding.api.protocol import EMBEDS, TextParts
from triptych.modalities.embedding.api.replies import json_response, numbers, signs, to_base64
from triptych.modalities.embedding.api.service import EmbedCall, EmbeddingService, Floats
from triptych.modalities.embedding.api.text import EmbeddingModel
from triptych.modalities.llm.api.translation import rename_errors

_REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "images": RefusedField("no model here turns images into vectors.", ([],)),
        "priority": RefusedField("texts are read as they come.", (0,)),
    }
)
_SIGNED = 128
_FORMS: Mapping[str, Callable[[Floats], Any]] = MappingProxyType(
    {
        "float": numbers,
        "base64": to_base64,
        "binary": lambda vector: [byte - _SIGNED for byte in signs(vector)],
        "ubinary": signs,
    }
)
_PROMPTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "search_query": ("query",),
        "search_document": ("document", "passage", "corpus"),
        "classification": (),
        "clustering": (),
    }
)
"""Names that a model's own prompts may have for Cohere's input types."""
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input": "texts",
        "dimensions": "output_dimension",
        "truncate_prompt_tokens to -1": "truncate to END",
        "truncate_prompt_tokens": "max_tokens",
    }
)
"""Cohere's names of the fields in errors."""
_Many = Field(min_length=1, max_length=limits.MAX_EMBEDDING_INPUTS, fail_fast=True)


class CohereEmbedRequest(NamesModel, NullIsAbsent):
    """Texts to embed."""

    tasks = EMBEDS

    texts: Annotated[list[InputText], _Many] | None = None
    inputs: Annotated[list[TextParts], _Many] | None = Field(
        default=None, description="Texts in parts, in place of texts."
    )
    input_type: Label = Field(
        default="", description="The name of one of the model's prompts, or Cohere's name for it."
    )
    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary"]], Field(min_length=1, max_length=4)
    ] = Field(default=["float"], description="The formats of the vectors.")
    output_dimension: int | None = Field(default=None, ge=1, le=limits.MAX_DIMENSIONS)
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=limits.MAX_PROMPT_TOKENS,
        description="Truncate longer texts to this many tokens, at most the model's limit.",
    )
    truncate: Literal["NONE", "START", "END"] = Field(
        default="END",
        description="The end at which longer texts are truncated; `NONE`: refuse them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        types = value.get("embedding_types") if isinstance(value, dict) else None
        if isinstance(types, list) and ("int8" in types or "uint8" in types):
            raise UnsupportedOption(
                "int8 and uint8 are not offered, because they need a scale: use float.",
                param="embedding_types",
            )
        return without_refused(value, _REFUSED)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequest("Send either texts or inputs.", param="texts")
        if self.truncate == "NONE" and self.max_tokens:
            raise UnsupportedOption(
                "max_tokens truncates texts: omit it, or set truncate to START or END.",
                param="max_tokens",
            )
        return self

    @property
    def all_texts(self) -> list[str]:
        """The texts of either field."""
        return self.texts or [each.text for each in self.inputs or ()]


class ApiVersion(BaseModel):
    """The version of Cohere's API."""

    version: Literal["2"] = "2"


class BilledUnits(BaseModel):
    """The tokens processed."""

    input_tokens: int
    image_tokens: int = 0


class CohereMeta(BaseModel):
    """The metadata of the answer."""

    api_version: ApiVersion = ApiVersion()
    billed_units: BilledUnits


class TypedVectors(BaseModel):
    """The vectors in the order of the texts, in each requested format."""

    # A field with the name of a type would hide it from the class's annotations.
    numbers: list[list[float]] | None = Field(default=None, alias="float")
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedReply(BaseModel):
    """Answer of `/v2/embed`."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: TypedVectors
    texts: list[str] | None = None
    meta: CohereMeta


def cohere_router(service: EmbeddingService) -> APIRouter:
    """The route of `service`."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["text"])

    @router.post("/v2/embed", response_model=CohereEmbedReply)
    async def embed(body: CohereEmbedRequest, request: Request) -> Response:
        """Embed texts, in Cohere's format."""
        context = Context.of(request)
        with rename_errors(_NAMES):
            embedded = await service.embed(_call(service, body, request))
        reply = CohereEmbedReply(
            id=f"embd-{context.call_id}",
            embeddings=TypedVectors.model_construct(),
            texts=body.texts,
            meta=CohereMeta(billed_units=BilledUnits(input_tokens=embedded.num_tokens)),
        ).model_dump(exclude_none=True)

        def document() -> dict[str, Any]:
            vectors = {
                form: [*map(_FORMS[form], embedded.vectors)]
                for form in dict.fromkeys(body.embedding_types)
            }
            return {**reply, "embeddings": vectors}

        return await json_response(embedded.vectors, document)

    return router


def _call(service: EmbeddingService, body: CohereEmbedRequest, request: Request) -> EmbedCall:
    """The call for `body`. Raises `UnknownModel`, `InvalidRequest` or `UnsupportedOption`."""
    model = service.model(body.model)
    if not service.pools:
        raise UnsupportedOption(
            "This API returns one vector per text, but with --no-pool-embeddings there is one per"
            " token: use /v1/embeddings."
        )
    num_dimensions = min(body.output_dimension or model.num_dimensions, model.num_dimensions)
    if {"binary", "ubinary"} & set(body.embedding_types) and num_dimensions % 8:
        raise InvalidRequest(
            f"Binary vectors need a multiple of 8 dimensions, not {num_dimensions}.",
            param="embedding_types",
        )
    prompt_name = _prompt_name(model, body.input_type)
    if body.input_type and not prompt_name:
        note_ignored(request, "input_type")
    cut = min(body.max_tokens or model.max_length, model.max_length)
    return EmbedCall(
        model=body.model,
        inputs=body.all_texts,
        dimensions=body.output_dimension or 0,
        prompt_name=prompt_name,
        max_tokens=0 if body.truncate == "NONE" else cut,
        keeps_end=body.truncate == "START",
        caller=Context.of(request).caller,
    )


def _prompt_name(model: EmbeddingModel, input_type: str) -> str:
    """The model's prompt for Cohere's input type; empty if the model has none for it.

    Raises `InvalidRequest` for a type that is neither Cohere's nor the model's.
    """
    names = (input_type, *_PROMPTS.get(input_type, ()))
    found = next((name for name in names if name in model.prompts), "")
    if input_type and not found and input_type not in _PROMPTS:
        known = ", ".join((*_PROMPTS, *model.prompts))
        raise InvalidRequest(
            f"Unsupported input_type {input_type[:80]!r}; supported are {known}.",
            param="input_type",
        )
    return found
