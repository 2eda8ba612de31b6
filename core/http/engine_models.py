"""`/v1/engine/models`: the models in memory, and unloading one by hand.

Owns the format and who may unload. A model is unloaded once no job needs it, so no request ends
early; the next request for it loads it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request
from pydantic import BaseModel

from triptych.core.engine_api.client import EngineClient
from triptych.core.engine_api.reports import ModelState
from triptych.core.errors import AdminKeyRequired, UnknownModel, from_info
from triptych.core.http.body import StrictRoute
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES, to_public
from triptych.core.http.fields import Name, Strict
from triptych.core.http.models import ModelCard
from triptych.core.process.metrics import held_bytes


class EngineModel(BaseModel):
    """A model in the engine: its state, memory, and seconds since its last job.

    `device_bytes` are its weights and caches on the device; `idle_s` is 0 while a job needs it.
    `num_loads` counts the loads that have begun: a change shows an unload between two answers.
    """

    model: str
    task: str
    state: ModelState
    progress: float
    error: str | None
    device_bytes: int
    idle_s: float
    num_loads: int


class EngineModels(BaseModel):
    """The models of the engine."""

    models: list[EngineModel]


class UnloadRequest(Strict):
    """The model to unload."""

    model: Name


class Unloading(BaseModel):
    """The state of the model as the request was taken; it becomes `unloaded`.

    A greater `num_loads` in `/v1/engine/models` means that it has been loaded again since.
    """

    model: str
    state: ModelState
    num_loads: int


def check_may_unload(request: Request) -> None:
    """Raise `AdminKeyRequired` unless the sender of a request may unload models."""
    if not Context.of(request).principal.is_admin:
        raise AdminKeyRequired("Only keys of --admin-key may unload models.")


def engine_models_router(
    client: EngineClient, cards: Sequence[ModelCard], aliases: Mapping[str, str]
) -> APIRouter:
    """Create the routes. `cards` are the models and aliases that the server lists."""
    router = APIRouter(route_class=StrictRoute, responses=ERROR_RESPONSES, tags=["engine"])
    tasks = {card.id: card.task for card in cards}

    @router.get("/v1/engine/models")
    async def list_engine_models() -> EngineModels:
        """List the models with their state, memory and idle time."""
        status = client.status()
        gauges = status.last_beat.gauges if status.last_beat else {}
        return EngineModels(
            models=[
                EngineModel(
                    model=each.model,
                    task=tasks.get(each.model, ""),
                    state=each.state,
                    progress=each.progress,
                    error=to_public(from_info(each.error)).message if each.error else None,
                    device_bytes=held_bytes(each.model, gauges),
                    idle_s=round(each.idle_s, 1),
                    num_loads=each.num_loads,
                )
                for each in status.models
            ]
        )

    @router.post("/v1/engine/unload")
    async def unload(body: UnloadRequest, request: Request) -> Unloading:
        """Unload a model as soon as no request needs it. With API keys, an admin key is needed."""
        check_may_unload(request)
        name = aliases.get(body.model, body.model)
        found = {each.model: each for each in client.status().models}
        if name not in found:
            raise UnknownModel.among(found, body.model)
        await client.unload(name)
        return Unloading(model=name, state=found[name].state, num_loads=found[name].num_loads)

    return router
