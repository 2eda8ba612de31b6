"""The app factory: middlewares, shared state and routers.

Owns the order of the layers, outermost first: the root path, paths without `/v1`, access (ids,
log), CORS, foreign sites, keys, disconnects, paths; then the routes and their exception handlers.
Knows no modality: routes come as routers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from triptych.core.engine_api.client import EngineClient
from triptych.core.errors import IGNORED_HEADER, TriptychError, UnknownModel
from triptych.core.http.access import Access
from triptych.core.http.auth import PUBLIC_ROUTES, Keyring, RequireKey
from triptych.core.http.batches.gate import LineGate
from triptych.core.http.browsers import GuardSites
from triptych.core.http.crash_dump import KeptRequests
from triptych.core.http.dialects import Dialect
from triptych.core.http.disconnect import FollowClient, InFlight
from triptych.core.http.engine_events import EngineEvents, engine_events_router
from triptych.core.http.engine_models import engine_models_router
from triptych.core.http.errors import handle_error
from triptych.core.http.explain import explain_router
from triptych.core.http.files.user_files import UserFiles
from triptych.core.http.health import health_router
from triptych.core.http.invocations import INVOCATIONS_ROUTE, Invocations
from triptych.core.http.metrics import HttpMetrics, metrics_router
from triptych.core.http.models import (
    ModelCard,
    ServedModels,
    Task,
    handle_unknown_model,
    models_router,
)
from triptych.core.http.page import PagesRouter
from triptych.core.http.paths import Paths, RootPath, ShortPaths, handle_http_error
from triptych.core.http.recent_requests import RecentRequests, RecordRequests
from triptych.core.http.request_log import RequestLog
from triptych.core.http.sleep import sleep_router
from triptych.core.http.socket_answers import SocketAnswers
from triptych.core.http.tracing import RequestTracing, TraceRequests
from triptych.core.http.upload import UploadBudget
from triptych.core.kv.tiers.salt import kept_salt
from triptych.core.limits import MAX_FORMS_HELD
from triptych.core.options.config import Config, ServerOptions
from triptych.core.options.served_names import ServedNames
from triptych.core.options.table import Resolved, describe
from triptych.core.options.tier_plan import TierPlan


class _App(FastAPI):
    """A FastAPI app whose document lists the tasks of the served models."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        schema = document["components"]["schemas"]["ModelCard"]["properties"]["task"]
        if self.state.task_names:
            schema["enum"] = self.state.task_names
        if self.state.options.root_path:
            document["servers"] = [{"url": self.state.options.root_path}]
        return document


class _Reference:
    """The OpenAPI document of an app, generated on the first request."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._document = b""

    async def show(self, request: Request) -> Response:
        """Return the document. A thread generates it, since that takes half a second."""
        document = self._document or await asyncio.to_thread(self._generate)
        return Response(document, media_type="application/json")

    def _generate(self) -> bytes:
        with self._lock:
            self._document = self._document or msgspec.json.encode(self._app.openapi())
        return self._document


_HANDLERS: dict[int | type[Exception], Any] = {
    UnknownModel: handle_unknown_model,
    HTTPException: handle_http_error,
    **dict.fromkeys((TriptychError, RequestValidationError), handle_error),
}


def create_app(
    config: Config,
    client: EngineClient,
    routers: Sequence[APIRouter],
    cards: Sequence[ModelCard] = (),
    tasks: Sequence[Task] = (),
    dialects: Sequence[Dialect] = (),
) -> FastAPI:
    """Create the ASGI app that serves `routers` over `client` and lists the models `cards`.

    `tasks` are those of the cards; `dialects` are the APIs of `routers` other than OpenAI's.
    `app.state` holds `options`, `body_observers`, `kept_requests`, `dialects`, `metrics`,
    `in_flight`, `gate`, `keyring`, `upload_budget`, `served`, `tasks`, `models_by_task`,
    `accepted_names`, `further_names`, `routes`, `tracing`, `socket_answers`, empty `more_models`
    and `user_files` and no `runtime_models`. Raises `ConfigError` for API keys, a folder of cached
    pages, or one for crash dumps that cannot be used.
    """
    served = ServedModels(cards, tasks, ServedNames.read(config.models).aliases)
    observers = _Observers.of(config.server, client, served)
    in_flight, salt = InFlight(), kept_salt(TierPlan.of(config))
    keyring = Keyring.from_options(config.server, salt)
    app = _App(
        title="Triptych",
        version=version("triptych"),
        openapi_url=None,  # it would be generated on the event loop
        docs_url=None,  # it loads scripts from another host; the page has its own reference
        redoc_url=None,
        redirect_slashes=False,  # a redirect would trust the Host header
        middleware=[
            *observers.layers(config.server, dialects),
            *_guards(config.server, keyring, _public(routers)),
            Middleware(RecordRequests, recent=observers.recent),
            Middleware(FollowClient, options=config.server, in_flight=in_flight),
            Middleware(Paths),
        ],
        exception_handlers=_HANDLERS,
    )
    app.state.dialects = tuple(dialects)
    app.state.tracing, app.state.metrics = observers.tracing, observers.metrics
    app.state.socket_answers = SocketAnswers(observers.recent, observers.tracing)
    app.state.in_flight, app.state.keyring = in_flight, keyring
    app.state.gate = LineGate(in_flight, config.store.batch_concurrency)
    _set_uploads(app.state, config.server)
    _set_observers(app.state, config)
    _set_names(app.state, config, served, [task.name for task in tasks])
    observers.metrics.watch(client.status, lambda: len(in_flight))
    own = (
        health_router(client.status, lambda: in_flight.is_draining),
        metrics_router(observers.metrics),
        engine_events_router(EngineEvents(client, served.cards, in_flight)),
        *(explain_router(client, observers.recent), engine_models_router(client, served)),
        *(sleep_router(client), models_router(served, client.status)),
    )
    _include(app, (*routers, *own))
    if root := config.server.root_path:
        app.add_middleware(RootPath, root=root)  # the outermost
    return app


def _set_uploads(state: State, options: ServerOptions) -> None:
    """Set the options, and what requests with files share."""
    state.options = options
    state.user_files = UserFiles(None)
    state.upload_budget = UploadBudget(MAX_FORMS_HELD * options.max_upload_bytes)


def _set_observers(state: State, config: Config) -> None:
    """Set what sees the bodies of requests: the log, and the requests kept for crash dumps."""
    server = config.server
    state.kept_requests = None
    if server.crash_dump_folder:
        options = describe(Resolved.of(config))
        changed = {each.name: value for each, value, _ in options if value != each.default}
        facts = {"version": version("triptych"), "options": changed}
        state.kept_requests = KeptRequests(server.crash_dump_folder, facts)
    log = RequestLog(server.log_requests_level) if server.log_requests else None
    state.body_observers = tuple(each for each in (log, state.kept_requests) if each is not None)


def _set_names(
    state: State, config: Config, served: ServedModels, task_names: Sequence[str]
) -> None:
    """Set the tasks of models and the names that requests may use for them."""
    state.served = served
    state.task_names = list(dict.fromkeys(task_names))
    state.models_by_task = served.by_task
    state.accepted_names = config.server.accept_model_names
    state.further_names = {}
    state.more_models = ()
    state.runtime_models = None
    state.tasks = served.tasks


@dataclass(frozen=True, slots=True)
class _Observers:
    """The records of requests: metrics, the recent ones, and traces if they are enabled."""

    metrics: HttpMetrics
    recent: RecentRequests
    tracing: RequestTracing | None

    @classmethod
    def of(cls, options: ServerOptions, client: EngineClient, served: ServedModels) -> _Observers:
        """Create the records, which also follow the jobs of `client`."""
        metrics = HttpMetrics(served.cards)
        tracing = RequestTracing.to_endpoint(options.otlp_traces_endpoint)
        client.journal.follow(metrics.observe_job)
        if tracing is not None:
            client.journal.follow(tracing.add_job)
        return cls(metrics, RecentRequests(), tracing)

    def layers(self, options: ServerOptions, dialects: Sequence[Dialect]) -> list[Middleware]:
        access = Middleware(
            Access,
            metrics=self.metrics,
            dialects=dialects,
            is_logged=options.access_log or options.log_requests,
        )
        if self.tracing is None:
            return [access]
        return [access, Middleware(TraceRequests, tracing=self.tracing)]


def _include(app: _App, routers: Sequence[APIRouter]) -> None:
    """Add the routes of the app and of `routers`.

    They are added as they are: `include_router` would build each a second time.
    """
    app.add_route("/openapi.json", _Reference(app).show, include_in_schema=False)
    app.router.routes.append(Route(INVOCATIONS_ROUTE, Invocations(), methods=["POST"]))
    for router in routers:
        app.router.routes.extend(router.routes)
    routes = list(app.routes)
    app.state.routes = tuple(routes)
    app.add_middleware(ShortPaths, routes=routes)


def _public(routers: Sequence[APIRouter]) -> Set[tuple[str, str]]:
    """Return the routes that need no key: probes and files of the page."""
    pages = (router.public for router in routers if isinstance(router, PagesRouter))
    return PUBLIC_ROUTES.union(*pages)


def _guards(
    options: ServerOptions, keyring: Keyring, public: Set[tuple[str, str]]
) -> list[Middleware]:
    """Return the layers that refuse requests by their origin or key."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(options.cors_origin),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients send a dozen headers; only the origin is checked
        expose_headers=[
            "request-id",
            "x-request-id",
            "retry-after",
            "x-prompt-truncated",
            "x-should-retry",
            "x-speech-coverage",
            "x-speech-sample-rate",
            IGNORED_HEADER,
        ],
    )
    return [
        *([cors] if options.cors_origin else []),
        Middleware(GuardSites, options=options, keyring=keyring),
        Middleware(RequireKey, keyring=keyring, public=public),
    ]
