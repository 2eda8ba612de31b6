"""Liveness, readiness and version of the server: `/livez /readyz /health /version`.

Owns the response format; the state comes from the engine client, which never blocks. The server is
alive while the engine's loop makes progress: answering HTTP in front of a hung engine is not
enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.reports import ModelStatus
from triptych.core.errors import from_info
from triptych.core.http.errors import to_public


class ModelHealth(BaseModel):
    """The state of one model: loading progress, and code and text of its error."""

    model: str
    state: str
    progress: float
    error: str | None
    message: str | None


class Health(BaseModel):
    """The state of the server. `reason` says why it is not ready, or not for all models.

    With API keys, `models` is empty for requests without a key.
    """

    status: Literal["ok", "unavailable"]
    reason: str
    is_alive: bool
    is_ready: bool
    is_draining: bool
    num_restarts: int
    num_replicas: int
    models: list[ModelHealth]


class Version(BaseModel):
    """The server's name and version."""

    name: str
    version: str


def health_router(status: Callable[[], EngineStatus], is_draining: Callable[[], bool]) -> APIRouter:
    """Create the probe routes. `is_draining` is this process's state; the engine has its own."""
    router = APIRouter(tags=["health"])
    unready: dict[int | str, dict[str, Any]] = {
        503: {"model": Health, "description": "Unavailable; the body has the reason."}
    }

    def answer(request: Request, response: Response, *, is_live_enough: bool) -> Health:
        now = status()
        draining = is_draining() or now.is_draining
        is_ok = now.is_alive if is_live_enough else now.is_alive and now.is_ready and not draining
        response.status_code = 200 if is_ok else 503
        response.headers["cache-control"] = "no-store"
        health = _describe(now, is_ok=is_ok, is_draining=draining)
        return health if request.state.has_key else health.model_copy(update={"models": []})

    @router.get("/livez", responses=unready)
    async def livez(request: Request, response: Response) -> Health:
        """Answer 200 while the engine's loop makes progress."""
        return answer(request, response, is_live_enough=True)

    @router.get("/readyz", responses=unready)
    @router.get("/health", responses=unready)
    @router.get("/v1/health", responses=unready)
    @router.get("/ping", responses=unready)
    async def readyz(request: Request, response: Response) -> Health:
        """Answer 200 while requests are accepted and can be served."""
        return answer(request, response, is_live_enough=False)

    @router.get("/version")
    async def show_version() -> Version:
        """Show the server's name and version."""
        return Version(name="triptych", version=version("triptych"))

    return router


def _describe(now: EngineStatus, *, is_ok: bool, is_draining: bool) -> Health:
    if is_ok:
        reason = _missing(now.models)
    else:
        reason = now.reason or ("draining" if is_draining else "not ready yet")
    return Health(
        status="ok" if is_ok else "unavailable",
        reason=reason,
        is_alive=now.is_alive,
        is_ready=now.is_ready,
        is_draining=is_draining,
        num_restarts=now.num_restarts,
        num_replicas=now.num_replicas,
        models=[
            ModelHealth(
                model=model.model,
                state=model.state,
                progress=model.progress,
                error=model.error.code if model.error else None,
                message=to_public(from_info(model.error)).message if model.error else None,
            )
            for model in now.models
        ],
    )


def _missing(models: Sequence[ModelStatus]) -> str:
    """How many models can be served, if not all."""
    num_able = sum(model.error is None for model in models)
    is_all = num_able == len(models)
    return "" if is_all else f"{num_able} of {len(models)} models can be served"
