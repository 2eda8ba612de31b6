"""The app factory: what every route shares, put together once.

Owns the order of the layers, outermost first: access (ids, log), CORS, keys, the tie to the
client, paths; then routes, whose errors one table answers. Knows no modality: routes come as
routers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from triptych.core.client import EngineClient
from triptych.core.config import Config, ServerOptions
from triptych.core.errors import TriptychError, UnknownModel
from triptych.core.http.access import Access
from triptych.core.http.auth import PUBLIC_ROUTES, Keyring, RequireKey
from triptych.core.http.disconnect import FollowClient, InFlight
from triptych.core.http.engine_events import EngineEvents, engine_events_router
from triptych.core.http.errors import handle_error
from triptych.core.http.health import health_router
from triptych.core.http.metrics import HttpMetrics, metrics_router
from triptych.core.http.models import ModelCard, Task, handle_unknown_model, models_router
from triptych.core.http.page import Pages, pages_router, public_routes
from triptych.core.http.paths import Paths, handle_http_error
from triptych.core.http.upload import UploadBudget
from triptych.core.limits import MAX_FORMS_HELD


class _App(FastAPI):
    """FastAPI, documenting the tasks that models may have here."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schema = document["components"]["schemas"]["ModelCard"]["properties"]["task"]
        if self.state.task_names:
            schema["enum"] = self.state.task_names
        return document


def create_app(
    config: Config,
    client: EngineClient,
    routers: Sequence[APIRouter],
    cards: Sequence[ModelCard] = (),
    tasks: Sequence[Task] = (),
    pages: Pages = MappingProxyType({}),
) -> FastAPI:
    """The ASGI app that serves `routers` in front of `client`, and lists `cards` of these `tasks`.

    `pages` are files for browsers, which need no key.

    `app.state` holds `options`, `metrics`, `in_flight`, `upload_budget`, `tasks` and `routes` for
    routes and for the server. Raises `ConfigError` for API keys that cannot be read.
    """
    metrics = HttpMetrics()
    in_flight = InFlight()
    app = _App(
        title="Triptych",
        version=version("triptych"),
        docs_url=None,  # they load scripts from elsewhere; ours is one of `pages`
        redoc_url=None,
        redirect_slashes=False,  # a redirect would trust the Host header
        middleware=_layers(config.server, metrics, in_flight, PUBLIC_ROUTES | public_routes(pages)),
        exception_handlers={
            UnknownModel: handle_unknown_model,
            HTTPException: handle_http_error,
            **dict.fromkeys((TriptychError, RequestValidationError), handle_error),
        },
    )
    app.state.options = config.server
    app.state.metrics = metrics
    app.state.in_flight = in_flight
    app.state.upload_budget = UploadBudget(MAX_FORMS_HELD * config.server.max_upload_bytes)
    by_name = {task.name: task for task in tasks}
    app.state.task_names = list(by_name)
    app.state.tasks = {card.id: by_name[card.task] for card in cards if card.task in by_name}
    metrics.watch(client.status, lambda: len(in_flight))
    health = health_router(client.status, lambda: in_flight.is_draining)
    events = engine_events_router(EngineEvents(client, cards, in_flight))
    routes = list(app.routes)
    own = (health, metrics_router(metrics), events, models_router(cards))
    for router in (*own, *routers, pages_router(pages)):
        routes += router.routes
        app.include_router(router)
    app.state.routes = tuple(routes)
    return app


def _layers(
    options: ServerOptions,
    metrics: HttpMetrics,
    in_flight: InFlight,
    public: Set[tuple[str, str]],
) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors_origin),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "content-type", "x-request-id"],
        expose_headers=[
            "x-request-id",
            "retry-after",
            "x-speech-coverage",
            "x-speech-sample-rate",
        ],
    )
    return [
        Middleware(Access, metrics=metrics),
        *([cors] if options.cors_origin else []),
        Middleware(RequireKey, keyring=Keyring.from_options(options), public=public),
        Middleware(FollowClient, options=options, in_flight=in_flight),
        Middleware(Paths),
    ]
