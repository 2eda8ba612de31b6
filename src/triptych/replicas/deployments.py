"""The two deployments on Ray Serve: engines, and the ingress in front of them.

Owns how each is built on its node, and the way between them. What they do is `core.router`'s and
the app's.
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
from triptych.core.weights.manifest import verify_ahead
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.registry import resolve_models
from triptych.replicas.handover import wait_replaced
from triptych.replicas.scaling import PAGE_USE, QUEUE_S
from triptych.schedulers.local import LocalClient

_BEATS_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 3600.0  # the largest weights, fetched and converted
_LOAD_POLL_S = 0.05


class EngineReplica:
    """One engine on a device of its own, on a thread of this process."""

    async def __init__(self, packed: bytes) -> None:  # type: ignore[misc] # Serve awaits it
        config = decode_json(packed, Config)
        logs.configure(config.server)
        models = await asyncio.to_thread(_models_here, config)
        if config.models.load == "startup":
            verify_ahead(Path(model.folder) for model in models)
        engine = await asyncio.to_thread(build_engine, with_models(config, models), models)
        client = LocalClient(engine)
        self._replica = Replica(
            serve.get_replica_context().replica_id.unique_id,
            client,
            build_codec(),
            page_size=config.cache.kv_cache_page_size,
            end_process=partial(os._exit, 1),
        )
        await _loaded(client)

    async def run(
        self, routed: RoutedRequest, message: bytes, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Run a job; `routed` was for the router."""
        async with aclosing(self._replica.run(message, is_watching=is_watching)) as packets:
            async for packet in packets:
                yield packet

    async def beat(self, is_watching: bool) -> bytes:
        """What the ingress tells of this replica."""
        return self._replica.beat(is_watching=is_watching)

    async def load(self, model: str) -> None:
        """Load a model."""
        await self._replica.load(model)

    def record_routing_stats(self) -> dict[str, Any]:
        """What routers go by; Serve asks, and passes it on to them."""
        found: dict[str, Any] = msgspec.to_builtins(self._replica.load_report())
        return found

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling` goes by."""
        report = self._replica.load_report()
        return {QUEUE_S: report.backlog_s, PAGE_USE: report.page_use}

    def check_health(self) -> None:
        """Raise where Serve is to replace this replica."""
        self._replica.check()

    async def __del__(self) -> None:
        await self._replica.close()


class Ingress:
    """The API: one process for all that is kept between requests."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, packed: bytes, engines: DeploymentHandle
    ) -> None:
        config = decode_json(packed, Config)
        logs.configure(config.server)
        models = await asyncio.to_thread(_models_here, config)
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
        """Refuse new requests, and finish those in flight; what is left ends with an error."""
        if self._draining is None:
            in_flight = self._app.state.in_flight
            self._draining = asyncio.create_task(in_flight.drain(self._drain_s))
        await asyncio.shield(self._draining)

    async def name(self) -> str:
        """Which replica this is."""
        return self._name

    async def _leave(self, own: DeploymentHandle) -> None:
        """Drain where another one takes over, before Serve cuts off what takes too long."""
        await wait_replaced(self._name, partial(_running, own))
        await self.drain()

    def check_health(self) -> None:
        """Raise where Serve is to replace this one: it has left, or cannot notice when to."""
        if self._leaving.done():
            raise Draining("This ingress takes no more requests.")

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        self._leaving.cancel()
        await self.drain()  # work without a request, as responses in the background, may be left
        await self._app.state.close()
        await self._client.close()


class ServeReplicas:
    """`core.router.client.Replicas` by a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._runs = handle.options(method_name="run", stream=True)

    async def run(
        self, routed: RoutedRequest, message: bytes, *, is_watching: bool
    ) -> AsyncGenerator[bytes, None]:
        """Send a job to the replica that the router of this handle chooses."""
        response = self._runs.remote(routed, message, is_watching)
        try:
            async for packet in response:
                yield packet
        except (RayActorError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error
        finally:
            response.cancel()

    async def beats(self, *, is_watching: bool) -> Sequence[bytes]:
        """A `ReplicaBeat` of each replica (`core.router.client.Replicas`)."""
        found = await self._ask("beat", is_watching)
        return [each for each in found if isinstance(each, bytes)]

    async def load(self, model: str) -> None:
        """Have every replica load a model; raises what loading raised."""
        for answer in await self._ask("load", model, timeout_s=_LOAD_TIMEOUT_S):
            if isinstance(answer, BaseException):
                raise EngineDown(f"{model} could not be loaded on every replica.") from answer

    async def close(self) -> None:
        """The handle goes with its process."""

    async def _ask(
        self, method: str, argument: Any, timeout_s: float = _BEATS_TIMEOUT_S
    ) -> Sequence[Any]:
        try:
            response = self._handle.broadcast(method, argument)
            found = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayError, RayServeException) as error:
            raise ReplicaLost(type(error).__name__) from error
        return list(found)


def _models_here(config: Config) -> tuple[ResolvedModel, ...]:
    """The models on this node, which may have to fetch them."""
    return resolve_models(Resolved.of(config), SilentProgress())


async def _running(ingresses: DeploymentHandle) -> Sequence[str] | None:
    """The names of those that Serve runs; `None` where that is not known."""
    try:
        response = ingresses.broadcast("name")
        found: Sequence[str] = await response.results_async(timeout_s=_BEATS_TIMEOUT_S)
    except DeploymentUnavailableError:
        return ()
    except (RayError, RayServeException, TimeoutError):
        return None
    return found


async def _loaded(client: LocalClient) -> None:
    """Wait until no model is being loaded. Raises what kept all of them from it."""
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
