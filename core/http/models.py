"""`/v1/models`: what is served here, whatever it does.

Owns the answer's shape. Knows no modality: each tells its models as cards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field

from triptych.core.errors import NotFound
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.limits import MAX_NAME_CHARS

Task = Literal["chat", "embedding", "speech", "transcription", "image"]


class ModelCard(BaseModel):
    """One model that is served. `max_model_len` is the context of a model that reads tokens.

    `input_modalities` are there where a model for chat takes more than text.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: Literal["triptych"] = "triptych"
    task: Task
    max_model_len: int | None = None
    input_modalities: list[Literal["text", "image"]] | None = None


class ModelList(BaseModel):
    """Answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def models_router(cards: Sequence[ModelCard]) -> APIRouter:
    """Lists `cards`, and shows each."""
    by_name = {card.id: card for card in cards}
    router = APIRouter(
        prefix="/v1/models",
        responses=ERROR_RESPONSES,
        tags=["models"],
    )

    @router.get("", response_model_exclude_none=True)
    async def list_models() -> ModelList:
        """The models served here."""
        return ModelList(data=list(cards))

    @router.get("/{name:path}", response_model_exclude_none=True)
    async def show_model(
        name: Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)],
    ) -> ModelCard:
        """One model."""
        if name not in by_name:
            raise NotFound(
                f"There is no model {name[:80]!r} here. Models: {', '.join(by_name)}.",
                param="model",
            )
        return by_name[name]

    return router
