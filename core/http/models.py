"""`/v1/models`: the served models of all tasks, with their routes.

Owns the response format, the default model of a request, and the error for a model of another task.
Knows no modality: each supplies its models as cards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field

from triptych.core.errors import InvalidRequest, NotFound, UnknownModel, WrongModel
from triptych.core.http.errors import ERROR_RESPONSES, handle_error
from triptych.core.http.fields import NamesModel, models_of
from triptych.core.limits import MAX_NAME_CHARS


class Task(NamedTuple):
    """A task of models: its name, a verb phrase for messages, and the route to post to."""

    name: str
    does: str
    route: str


class ModelCard(BaseModel):
    """One served model. `max_model_len` is the context length of a model that reads tokens.

    `input_modalities` is set for chat models that take more than text, `default_size` for image
    models; `weight_bytes` is the size of the weights' files.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = Field(default_factory=lambda: int(time.time()))
    owned_by: Literal["triptych"] = "triptych"
    task: str
    max_model_len: int | None = None
    input_modalities: list[Literal["text", "image"]] | None = None
    default_size: str | None = None
    weight_bytes: int | None = None


class ModelList(BaseModel):
    """The response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def with_model(request: Request, kind: Any, fields: Any) -> Any:
    """Insert the default model into the parsed body of a request of type `kind`.

    The default is the only model of the task. Raises `InvalidRequest` if there are several,
    `NotFound` if there is none.
    """
    named = next((each for each in models_of(kind) if issubclass(each, NamesModel)), None)
    if named is None:
        return fields
    if not isinstance(fields, dict) or fields.get("model") not in (None, ""):
        return fields
    by_task: Mapping[str, Sequence[str]] = request.app.state.models_by_task
    names = next((by_task[task] for task in named.tasks if task in by_task), ())
    if not names:
        raise NotFound("There is no model for this route here.", param="model")
    if len(names) > 1:
        raise InvalidRequest(
            f"Set model: this route has several, {', '.join(names)}.",
            param="model",
        )
    return {**fields, "model": names[0]}


async def handle_unknown_model(request: Request, error: Exception) -> Response:
    """Handle `UnknownModel` for FastAPI, with the right route for a model of another task."""
    assert isinstance(error, UnknownModel)
    tasks: Mapping[str, Task] = request.app.state.tasks
    if error.name not in tasks:
        return await handle_error(request, error)
    _, does, route = tasks[error.name]
    there = error.message.partition(" here. ")[2]
    message = f"{error.name} {does}: post to {route}. {there}"
    return await handle_error(request, WrongModel(message, param=error.param))


def models_router(cards: Sequence[ModelCard]) -> APIRouter:
    """Create the routes that list and show `cards`."""
    by_name = {card.id: card for card in cards}
    router = APIRouter(responses=ERROR_RESPONSES, tags=["models"])

    @router.get("/v1/models", response_model_exclude_none=True)
    async def list_models() -> ModelList:
        """List the served models."""
        return ModelList(data=list(cards))

    @router.get("/v1/models/{name:path}", response_model_exclude_none=True)
    async def show_model(
        name: Annotated[str, Path(max_length=MAX_NAME_CHARS)],
    ) -> ModelCard:
        """Show one model."""
        if not name:
            raise NotFound("This path names no model; GET /v1/models lists them.")
        if name not in by_name:
            raise UnknownModel.among(by_name, name)
        return by_name[name]

    return router
