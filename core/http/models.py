"""`/v1/models`: the served models of all tasks, with their routes.

Owns the response format, the default model of a request, and the error for a model of another task.
Knows no modality: each supplies its models as cards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field
from starlette.datastructures import State

from triptych.core.engine_api.client import EngineStatus
from triptych.core.errors import InvalidRequest, NotFound, UnknownModel, WrongModel
from triptych.core.http.errors import ERROR_RESPONSES, handle_error
from triptych.core.http.fields import NamesModel, TakesModel, models_of
from triptych.core.http.model_names import model_meant, without_tag
from triptych.core.limits import MAX_NAME_CHARS


class Task(NamedTuple):
    """A task of models: its name, a verb phrase for messages, and the route to post to."""

    name: str
    does: str
    route: str


class ModelCard(BaseModel):
    """One served model. `max_model_len` is the context length of a model that reads tokens.

    `input_modalities` is set for chat models that take more than text, `default_size` for image
    models; `weight_bytes` is the size of the weights' files. The `parent` of an adapter is the
    model that it changes.
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
    parent: str | None = None


class MoreModels(Protocol):
    """Models without weights of their own: adapters of served ones, which come and go."""

    def cards(self) -> Sequence[ModelCard]:
        """The models that are offered now."""

    def __contains__(self, name: object) -> bool:
        """Whether `name` is one of them."""


class ServedModels:
    """The cards of the served models and of their `aliases`, in order.

    Its attributes change as models come and go; who keeps one of them sees every change. `tasks`
    has the task of each name, `by_task` the main names of the models of each task.
    """

    def __init__(
        self, cards: Sequence[ModelCard], tasks: Sequence[Task], aliases: Mapping[str, str]
    ) -> None:
        self._known = {task.name: task for task in tasks}
        self.aliases = aliases
        self.cards: dict[str, ModelCard] = {}
        self.tasks: dict[str, Task] = {}
        self.by_task: dict[str, list[str]] = {}
        for card in cards:
            self.add(card)

    def add(self, card: ModelCard) -> None:
        """List a model or an alias."""
        self.cards[card.id] = card
        if card.task in self._known:
            self.tasks[card.id] = self._known[card.task]
        if card.id not in self.aliases:
            self.by_task.setdefault(card.task, []).append(card.id)

    def remove(self, name: str) -> None:
        """List a model and its aliases no longer."""
        aliases = [alias for alias, own in self.aliases.items() if own == name]
        for each in (name, *aliases):
            self.tasks.pop(each, None)
            card = self.cards.pop(each, None)
            if card is not None and each == name:
                names = self.by_task[card.task]
                names.remove(name)
                if not names:
                    del self.by_task[card.task]

    def task_of(self, name: str) -> str:
        """Return the name of a model's task; empty for a model that is not listed."""
        return self.cards[name].task if name in self.cards else ""


class ModelList(BaseModel):
    """The response of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def with_model(request: Request, kind: Any, fields: Any) -> Any:
    """Insert the default model into the parsed body of a request of type `kind`.

    The default is the only model of the task; types other than `NamesModel` have their own. A
    further name of a model is replaced by its own.
    Raises `InvalidRequest` if there are several, `NotFound` if there is none.
    """
    named = next((each for each in models_of(kind) if issubclass(each, TakesModel)), None)
    if named is None or not isinstance(fields, dict):
        return fields
    state, given = request.app.state, fields.get("model")
    by_task: Mapping[str, Sequence[str]] = state.models_by_task
    names = next((by_task[task] for task in named.tasks if task in by_task), ())
    if given in (None, ""):
        return {**fields, "model": _only(names)} if issubclass(named, NamesModel) else fields
    is_more = any(given in each for each in state.more_models)
    if isinstance(given, str) and given not in state.tasks and not is_more:
        meant = _other_name(state, given) or model_meant(
            state.accepted_names, given, named.tasks[0], names
        )
        return {**fields, "model": meant or given}
    return fields


def _only(names: Sequence[str]) -> str:
    if not names:
        raise NotFound("There is no model for this route here.", param="model")
    if len(names) > 1:
        raise InvalidRequest(
            f"Set model: this route has several, {', '.join(names)}.",
            param="model",
        )
    return names[0]


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


def models_router(served: ServedModels, read_status: Callable[[], EngineStatus]) -> APIRouter:
    """Create the routes that list and show the models, and their adapters.

    `read_status` has the contexts that are reduced for want of memory.
    """

    def all_cards(state: State) -> dict[str, ModelCard]:
        more: Sequence[MoreModels] = state.more_models
        further = {card.id: card for each in more for card in each.cards()}
        cards = served.cards | further | served.cards  # a model comes before an adapter
        return cards | _reduced(cards, served.aliases, read_status())

    router = APIRouter(responses=ERROR_RESPONSES, tags=["models"])

    @router.get("/v1/models", response_model_exclude_none=True)
    async def list_models(request: Request) -> ModelList:
        """List the served models."""
        return ModelList(data=list(all_cards(request.app.state).values()))

    @router.get("/v1/models/{name:path}", response_model_exclude_none=True)
    async def show_model(
        request: Request,
        name: Annotated[str, Path(max_length=MAX_NAME_CHARS)],
    ) -> ModelCard:
        """Show one model."""
        if not name:
            raise NotFound("This path names no model; GET /v1/models lists them.")
        by_name = all_cards(request.app.state)
        own = name if name in by_name else _own_name(request.app.state, name)
        if own not in by_name:
            raise UnknownModel.among(by_name, name)
        return by_name[own]

    return router


def _reduced(
    cards: Mapping[str, ModelCard], aliases: Mapping[str, str], status: EngineStatus
) -> dict[str, ModelCard]:
    """The cards of models, and of their aliases and adapters, that have a reduced context."""
    lengths = {each.model: each.reduced_context for each in status.models if each.reduced_context}
    own = {name: card.parent or aliases.get(name, name) for name, card in cards.items()}
    return {
        name: card.model_copy(update={"max_model_len": lengths[own[name]]})
        for name, card in cards.items()
        if own[name] in lengths
    }


def _own_name(state: State, name: str) -> str | None:
    """Return the model that `name` means on the routes of some task.

    With `any`, too, it must be a name of OpenAI's: other names belong to no task.
    """
    accepted = "served" if state.accepted_names == "served" else "openai"
    by_task = state.models_by_task
    meant = (model_meant(accepted, name, task, models) for task, models in by_task.items())
    return _other_name(state, name) or next(filter(None, meant), None)


def _other_name(state: State, name: str) -> str | None:
    """Return the model with the further name `name`, or with this name and Ollama's tag."""
    bare = without_tag(name, state.tasks)
    further: str | None = state.further_names.get(name)
    return further or (bare if bare in state.tasks else None)
