"""`/v1/models` as Anthropic's clients read it: the models that answer messages.

Owns the fields of the answer and its pages. OpenAI's list of all served models is `core.http`'s; a
header distinguishes the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from triptych.core.errors import UnknownModel
from triptych.core.limits import MAX_NAME_CHARS
from triptych.modalities.llm.api.anthropic.dialect import VERSION_HEADER
from triptych.modalities.llm.api.text import TextModel

_PAGE = 20
_MAX_PAGE = 1000

ModelId = Annotated[str, Query(max_length=MAX_NAME_CHARS)]


class ModelInfo(BaseModel):
    """One model. An answer may fill the context that the prompt leaves."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, model: TextModel) -> ModelInfo:
        """The information about `model`."""
        return cls(
            type="model",
            id=model.name,
            display_name=model.name,
            created_at=datetime.fromtimestamp(model.created, UTC),
            lifecycle="active",
            max_input_tokens=model.context_length,
            max_tokens=model.context_length,
        )


class ModelPage(BaseModel):
    """A page of the models, in order."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class _OwnRoute(APIRoute):
    """A route for Anthropic's clients at a path that OpenAI's clients also use."""

    def matches(self, scope: Scope) -> tuple[Match, dict[str, Any]]:
        is_own = VERSION_HEADER in Headers(scope=scope)
        match, found = super().matches(scope)
        return match if is_own else Match.NONE, dict(found)


def model_routes(models: Mapping[str, TextModel], find: Callable[[str], TextModel]) -> APIRouter:
    """The routes that list `models` and show one, as `find` has it: with the context that fits."""
    router = APIRouter(route_class=_OwnRoute, include_in_schema=False)

    @router.get("/v1/models")
    async def list_models(
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = _PAGE,
        after_id: ModelId | None = None,
        before_id: ModelId | None = None,
    ) -> ModelPage:
        """List the models that answer messages."""
        names, is_backward = list(models), before_id is not None
        if after_id is not None:
            names = names[_place(names, after_id) + 1 :]
        if before_id is not None:
            names = names[: _place(names, before_id)]
        shown = names[-limit:] if is_backward else names[:limit]
        return ModelPage(
            data=[ModelInfo.of(find(name)) for name in shown],
            has_more=len(shown) < len(names),
            first_id=shown[0] if shown else None,
            last_id=shown[-1] if shown else None,
        )

    @router.get("/v1/models/{name:path}")
    async def show_model(
        name: Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)],
    ) -> ModelInfo:
        """Return one model."""
        if name not in models:
            raise UnknownModel.among(models, name)
        return ModelInfo.of(find(name))

    return router


def _place(names: Sequence[str], name: str) -> int:
    if name not in names:
        raise UnknownModel.among(names, name)
    return names.index(name)
