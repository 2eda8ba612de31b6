"""Start, drain and stop: the HTTP server around an app.

Owns the listening socket and the order of going down. Signals belong to the process that calls
this; what is served belongs to the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI

from triptych.core.config import Config
from triptych.core.http.listener import BACKLOG, bind, url_of
from triptych.core.http.wire import GuardedProtocol, WireLimits
from triptych.core.limits import KEEP_ALIVE_S, MAX_CONNECTIONS

_OWN_DESCRIPTORS = 256  # models, logs, the store, children, sockets of the engine
_CLOSE_S = 2  # for connections to close once nothing is in flight


class HttpServer:
    """A server that listens. Made by `serve`, given to its `on_started`."""

    def __init__(self, app: FastAPI, config: Config, listener: socket.socket) -> None:
        self._app = app
        self._options = config.server
        self._listener = listener
        self._uvicorn: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(self._listener)

    @property
    def num_connections(self) -> int:
        """Open connections, busy or idle."""
        return 0 if self._uvicorn is None else len(self._uvicorn.server_state.connections)

    async def run(self, wire: WireLimits, on_started: Callable[[HttpServer], None]) -> None:
        """Serve until stopped."""
        protocol = partial(GuardedProtocol, wire=wire, dialects=self._app.state.dialects)
        config = uvicorn.Config(
            self._app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a caller's X-Forwarded-For is the caller's word
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=_CLOSE_S,
            backlog=BACKLOG,
        )
        self._uvicorn = _Uvicorn(config, lambda: on_started(self))
        await self._uvicorn.serve(sockets=[self._listener])

    async def drain(self) -> None:
        """Refuse new requests, finish those in flight within `drain_timeout_s`, then stop.

        What is not finished by then ends with a typed `draining` error. Probes are answered
        until the end: `/readyz` says 503 from the first moment.
        """
        await self._app.state.in_flight.drain(self._options.drain_timeout_s)
        self.stop()

    def stop(self) -> None:
        """Stop now; what is in flight is cut off."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, telling when it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report it."""
        await super().startup(sockets)
        if self.started:
            self._on_started()


async def serve(
    app: FastAPI,
    config: Config,
    *,
    on_started: Callable[[HttpServer], None],
    listener: socket.socket | None = None,
    wire: WireLimits | None = None,
) -> None:
    """Serve `app` until `HttpServer.drain` or `.stop` is called on what `on_started` got.

    `listener` is a socket from `bind`, taken here if not given. Raises `ConfigError` if the port
    is taken.
    """
    server = HttpServer(app, config, listener or bind(config.server))
    await server.run(wire or _limits(config), on_started)


def _limits(config: Config) -> WireLimits:
    """The usual limits, with no more connections than there are descriptors for.

    One connection too many could not be accepted, nor refused: it would be tried again and again.
    """
    num_free = raise_descriptor_limit()
    return WireLimits(
        linger_s=config.server.stream_timeout_s,
        num_connections=min(MAX_CONNECTIONS, num_free - min(_OWN_DESCRIPTORS, num_free // 2)),
    )


def raise_descriptor_limit() -> int:
    """How many descriptors this process may have, once it may have all that it can allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft
