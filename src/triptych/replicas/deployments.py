"""The two Ray Serve deployments: engines, and the ingress in front of them.

Owns their construction on a node and the transport between them. The work itself is in
`core.router` and the app.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from triptych.compose import build_app, build_codec, build_engine, with_models
from triptych.core.errors import Draining, EngineDown, SetupError
from triptych.core.options.config import Config
from triptych.core.options.table import Resolved
from triptych.core.process import logs
from triptych.core.process.typed import decode_json
from triptych.core.router.client import ReplicaLost, ReplicatedClient
from triptych.core.router.replica import Replica
from triptych.core.router.request import RoutedRequest
from triptych.core.weights.manifest import verify_in_background
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.registry import resolve_models
from triptych.replicas.handover import wait_replaced
from triptych.replicas.request_ids import ProxyRequestIds
from triptych.replicas.scaling import PAGE_USE, QUEUE_S
from triptych.schedulers.local import LocalClient

_BEATS_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 3600.0  # enough to fetch and convert the largest weights
_LOAD_POLL_S = 0.05


class EngineReplica:
    """One engine with its own device, on a thread of this process."""

    async def __init__(self, packed: bytes) -> None:  # type: ignore[misc] # Serve awaits it
        config = decode_json(packed, Config)
        logs.configure(config.server)
        models = await asyncio.to_thread(_resolve, config)
        if config.models.load == "startup":
            verify_in_background(Path(model.folder) for model in models)
        engine = await asyncio.to_thread(build_engine, with_models(config, models), models)
        client = LocalClient(engine)
        self._replica = Replica(
            serve.get_replica_context().replica_id.unique_id,
            client,
            build_codec(),
            page_size=config.cache.kv_cache_page_size,
            end_process=partial(os._exit, 1),
        )
        await _wait_loaded(client)

    async def run(
        self, routed: RoutedRequest, message: bytes, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Run a job; `routed` is for the router only."""
        async with aclosing(self._replica.run(message, is_watching=is_watching)) as packets:
            async for packet in packets:
                yield packet

    async def beat(self, is_watching: bool) -> bytes:
        """Return this replica's status message for the ingress."""
        return self._replica.beat(is_watching=is_watching)

    async def load(self, model: str) -> None:
        """Load a model on this replica."""
        await self._replica.load(model)

    async def unload(self, model: str) -> None:
        """Unload a model on this replica."""
        await self._replica.unload(model)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the load for routers; called by Serve."""
        found: dict[str, Any] = msgspec.to_builtins(self._replica.load_report())
        return found

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `scaling`; called by Serve."""
        report = self._replica.load_report()
        return {QUEUE_S: report.backlog_s, PAGE_USE: report.page_use}

    def check_health(self) -> None:
        """Raise if Serve must replace this replica."""
        self._replica.check()

    async def __del__(self) -> None:
        await self._replica.close()


class Ingress:
    """The API: one process that holds all state between requests."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, packed: bytes, engines: DeploymentHandle
    ) -> None:
        config = decode_json(packed, Config)
        logs.configure(config.server)
        models = await asyncio.to_thread(_resolve, config)
        self._drain_s = config.server.drain_timeout_s
        self._client = ReplicatedClient(
            ServeReplicas(engines), build_codec(), stream_timeout_s=config.server.stream_timeout_s
        )
        self._app = build_app(with_models(config, models), models, self._client)
        await self._app.state.start()
        context = serve.get_replica_context()
        self._name: str = context.replica_id.unique_id
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        self._draining: asyncio.Task[None] | None = None
        self._leaving = asyncio.create_task(self._leave(own))

    async def drain(self) -> None:
        """Refuse new requests, finish those in flight, and end the rest with an error."""
        if self._draining is None:
            in_flight = self._app.state.in_flight
            self._draining = asyncio.create_task(in_flight.drain(self._drain_s))
        await asyncio.shield(self._draining)

    async def name(self) -> str:
        """Return this ingress's replica name."""
        return self._name

    async def _leave(self, own: DeploymentHandle) -> None:
        """Drain once another ingress takes over, before Serve kills slow requests."""
        await wait_replaced(self._name, partial(_find_running, own))
        await self.drain()

    def check_health(self) -> None:
        """Raise if Serve must replace this ingress: it has drained, or its watch task failed."""
        if self._leaving.done():
            raise Draining("This ingress accepts no more requests.")

    def __serve_build_asgi_app__(self) -> Any:
        return ProxyRequestIds(self._app)

    async def __del__(self) -> None:
        self._leaving.cancel()
        await self.drain()  # background responses may still run
        await self._app.state.close()
        await self._client.close()


class ServeReplicas:
    """`core.router.client.Replicas` over a Ray Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._runs = handle.options(method_name="run", stream=True)

    async def run(
        self, routed: RoutedRequest, message: bytes, *, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Send a job to the replica chosen by the handle's router."""
        response = self._runs.remote(routed, message, is_watching)
        try:
            async for packet in response:
                yield packet
        except (RayActorError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error
        finally:
            response.cancel()

    async def beats(self, *, is_watching: bool) -> Sequence[bytes]:
        """Return a `ReplicaBeat` of each replica (`core.router.client.Replicas`)."""
        found = await self._ask("beat", is_watching)
        return [each for each in found if isinstance(each, bytes)]

    async def load(self, model: str) -> None:
        """Load a model on every replica; raises `EngineDown` if one fails."""
        for answer in await self._ask("load", model, timeout_s=_LOAD_TIMEOUT_S):
            if isinstance(answer, BaseException):
                raise EngineDown(f"{model} could not be loaded on every replica.") from answer

    async def unload(self, model: str) -> None:
        """Unload a model on every replica that answers."""
        await self._ask("unload", model)

    async def close(self) -> None:
        """Do nothing: the handle ends with its process."""

    async def _ask(
        self, method: str, argument: Any, timeout_s: float = _BEATS_TIMEOUT_S
    ) -> Sequence[Any]:
        try:
            response = self._handle.broadcast(method, argument)
            found = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error
        return list(found)


def _resolve(config: Config) -> tuple[ResolvedModel, ...]:
    """Resolve the models on this node, fetching them if needed."""
    return resolve_models(Resolved.of(config), SilentProgress())


async def _find_running(ingresses: DeploymentHandle) -> Sequence[str] | None:
    """Return the names of the running ingresses; `None` if unknown."""
    try:
        response = ingresses.broadcast("name")
        found: Sequence[str] = await response.results_async(timeout_s=_BEATS_TIMEOUT_S)
    except DeploymentUnavailableError:
        return ()
    except (RayError, RayServeException, TimeoutError):
        return None
    return found


async def _wait_loaded(client: LocalClient) -> None:
    """Wait until no model is loading. Raises the errors if all models failed."""
    while True:
        status = client.status()
        if not status.is_alive:
            raise EngineDown(status.reason)
        states = {each.state for each in status.models}
        if states == {"failed"}:
            errors = {each.error.message for each in status.models if each.error}
            raise SetupError("; ".join(sorted(errors)))
        if states and "loading" not in states:
            return
        await asyncio.sleep(_LOAD_POLL_S)
