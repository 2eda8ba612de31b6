"""`/v1/engine/models`: the models, and fetching, loading, unloading and deleting one by hand.

Owns the format and who may change the models. A model is unloaded or deleted once no job needs it,
so no request ends early; the next request for an unloaded one loads it again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request
from msgspec import structs
from pydantic import BaseModel, Field
from starlette.responses import Response

from triptych.core.engine_api.client import EngineClient, EngineStatus
from triptych.core.engine_api.reports import ModelState, ModelStatus
from triptych.core.errors import AdminKeyRequired, UnknownModel, from_info
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES, to_public
from triptych.core.http.fields import Name, Strict
from triptych.core.http.models import ModelCard, ServedModels
from triptych.core.http.runtime_models import Pull, RuntimeModels, refused_models
from triptych.core.http.sse import EventStream, described
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.process.metrics import held_bytes
from triptych.core.weights.fetching import FetchProgress
from triptych.core.weights.progress import Action


class EngineModel(BaseModel):
    """A model in the engine: its state, memory, and seconds since its last job.

    `device_bytes` are its weights and caches on the device; `idle_s` is 0 while a job needs it.
    `num_loads` counts the loads that have begun: a change shows an unload between two answers.
    `keep_s` is how long it stays in memory when idle, `None`: as long as there is room.
    `weight_bytes` is the size of its files.
    """

    model: str
    task: str
    state: ModelState
    progress: float
    error: str | None
    device_bytes: int
    idle_s: float
    num_loads: int
    keep_s: float | None
    weight_bytes: int | None


class EngineModels(BaseModel):
    """The models of the engine."""

    models: list[EngineModel]


class EngineModelRequest(Strict):
    """The model to load or unload."""

    model: Name


class EnginePullRequest(Strict):
    """The model to fetch, as for `--model`."""

    model: Name
    name: Name | None = Field(default=None, description="The name to serve it under.")
    revision: Name | None = Field(default=None, description="Branch, tag or commit of the hub.")
    stream: bool = Field(default=True, description="Report the progress as events.")


class PullProgress(BaseModel):
    """The progress of a task. `total_bytes` is 0 where the length is unknown."""

    type: Literal["engine.pull.progress"] = "engine.pull.progress"
    action: Action
    num_bytes: int
    total_bytes: int


class PullCompleted(BaseModel):
    """The model is served from now on; its first use loads it."""

    type: Literal["engine.pull.completed"] = "engine.pull.completed"
    model: ModelCard


class Unloading(BaseModel):
    """The state of the model as the request was taken; it becomes `unloaded`.

    A greater `num_loads` in `/v1/engine/models` means that it has been loaded again since.
    """

    model: str
    state: ModelState
    num_loads: int


class LlamaCppReply(BaseModel):
    """The answer of llama.cpp's routes."""

    success: bool = True


class DeletedModel(BaseModel):
    """The answer to a deletion. `deleted_bytes` is `None` where the files were kept.

    Files are kept in a folder that is not the server's, or if another model has them, too.
    """

    id: str
    object: Literal["model"] = "model"
    deleted: bool = True
    deleted_bytes: int | None


def check_is_admin(request: Request) -> None:
    """Raise `AdminKeyRequired` unless the sender of a request may load and unload models."""
    if not Context.of(request).principal.is_admin:
        raise AdminKeyRequired("Only keys of --admin-key may change the models.")


def check_may_store(request: Request) -> None:
    """Raise `AdminKeyRequired` unless the sender of a request may fetch and delete."""
    check_is_admin(request)
    if not (request.app.state.keyring.has_keys or _is_on_this_machine(request)):
        raise AdminKeyRequired(
            "A server without --admin-key fetches and deletes models and adapters for callers on"
            " its machine only."
        )


def _is_on_this_machine(request: Request) -> bool:
    if request.client is None:  # a local socket
        return True
    try:
        address = ip_address(request.client.host.partition("%")[0])
    except ValueError:  # some other name that stands for the caller
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def lift_time_limit(request: Request) -> None:
    """Let a request take as long as a fetch or a load takes."""
    request.state.watcher.lift_limit()


def engine_models_router(client: EngineClient, served: ServedModels) -> APIRouter:
    """Create the routes. `served` are the models and aliases that the server lists."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["engine"])

    @router.get("/v1/engine/models")
    async def list_engine_models() -> EngineModels:
        """List the models with their state, memory and idle time."""
        status = client.status()
        return EngineModels(models=[_described(each, status, served) for each in status.models])

    @router.post("/v1/engine/load")
    async def load(body: EngineModelRequest, request: Request) -> EngineModel:
        """Load a model, and answer once it is ready. With API keys, an admin key is needed."""
        check_is_admin(request)
        lift_time_limit(request)
        name = _name(body.model, client, served)
        with refused_models():
            await client.load(name)
        found = _state(name, client)  # as reported, which may be before the load
        return _described(
            structs.replace(found, state="ready", progress=1.0, error=None), client.status(), served
        )

    @router.post("/v1/engine/unload")
    async def unload(body: EngineModelRequest, request: Request) -> Unloading:
        """Unload a model as soon as no request needs it. With API keys, an admin key is needed."""
        check_is_admin(request)
        name = _name(body.model, client, served)
        found = _state(name, client)
        await client.unload(name)
        return Unloading(model=name, state=found.state, num_loads=found.num_loads)

    @router.post("/v1/models/load")
    async def load_as_llama_cpp(body: EngineModelRequest, request: Request) -> LlamaCppReply:
        """Load a model, as llama.cpp's router does."""
        await load(body, request)
        return LlamaCppReply()

    @router.post("/v1/models/unload")
    async def unload_as_llama_cpp(body: EngineModelRequest, request: Request) -> LlamaCppReply:
        """Unload a model, as llama.cpp's router does."""
        await unload(body, request)
        return LlamaCppReply()

    _add_storage(router)
    return router


def _add_storage(router: APIRouter) -> None:
    @router.post(
        "/v1/engine/pull",
        response_model=None,
        responses={200: {"model": ModelCard, "content": described(PullProgress, PullCompleted)}},
    )
    async def pull(body: EnginePullRequest, request: Request) -> Response | ModelCard:
        """Fetch a model and serve it. With API keys, an admin key is needed.

        The fetch ends with its last reader; the next one goes on with files that are partly here.
        """
        check_may_store(request)
        lift_time_limit(request)
        models = RuntimeModels.of(request)
        begun = models.pull(body.model, name=body.name or "", revision=body.revision or "")
        if body.stream:
            heartbeat_s = Context.of(request).options.heartbeat_s
            return EventStream(_events(begun), heartbeat_s=heartbeat_s, end=b"", is_named=True)
        async with aclosing(followed(begun)) as notes:
            *_, card = [note async for note in notes]
        assert isinstance(card, ModelCard), "a pull ends with a card"
        return card

    @router.delete("/v1/models/{name:path}")
    async def delete(
        request: Request, name: Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]
    ) -> DeletedModel:
        """Serve a model no longer, and delete its files if they are in a cache."""
        check_may_store(request)
        lift_time_limit(request)
        num_bytes = await RuntimeModels.of(request).delete(name)
        return DeletedModel(id=name, deleted_bytes=num_bytes)


async def followed(begun: Pull | ModelCard) -> AsyncGenerator[FetchProgress | ModelCard, None]:
    """Yield the progress of a pull, and the card last."""
    if isinstance(begun, ModelCard):
        yield begun
        return
    async with aclosing(begun.follow()) as notes:
        async for note in notes:
            yield note


async def _events(begun: Pull | ModelCard) -> AsyncGenerator[BaseModel, None]:
    async with aclosing(followed(begun)) as notes:
        async for note in notes:
            if isinstance(note, ModelCard):
                yield PullCompleted(type="engine.pull.completed", model=note)
            else:
                yield PullProgress(
                    type="engine.pull.progress",
                    action=note.action,
                    num_bytes=note.num_bytes,
                    total_bytes=note.total_bytes,
                )


def _name(asked: str, client: EngineClient, served: ServedModels) -> str:
    """Return the engine's name of a model. Raises `UnknownModel`."""
    name = served.aliases.get(asked, asked)
    known = [*(each.model for each in client.status().models), *served.cards]
    if name not in known:
        raise UnknownModel.among(known, asked)
    return name


def _state(name: str, client: EngineClient) -> ModelStatus:
    """Return the state of a model; one that the engine has not reported yet is not in memory."""
    found = (each for each in client.status().models if each.model == name)
    return next(found, ModelStatus(model=name, state="unloaded"))


def _described(model: ModelStatus, status: EngineStatus, served: ServedModels) -> EngineModel:
    card = served.cards.get(model.model)
    return EngineModel(
        model=model.model,
        task=served.task_of(model.model),
        state=model.state,
        progress=model.progress,
        error=to_public(from_info(model.error)).message if model.error else None,
        device_bytes=held_bytes(model.model, status.last_beat.gauges if status.last_beat else {}),
        idle_s=round(model.idle_s, 1),
        num_loads=model.num_loads,
        keep_s=model.keep_s if model.keep_s >= 0 else None,
        weight_bytes=card.weight_bytes if card else None,
    )
