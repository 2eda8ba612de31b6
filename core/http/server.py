"""Start, drain and stop of the HTTP server of an app.

Owns the listening socket and the order of shutdown. Knows no signals, which belong to the calling
process, and no routes, which belong to the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from triptych.core.http.listener import BACKLOG, bind, url_of
from triptych.core.http.tls import tls_context
from triptych.core.http.wire import GuardedProtocol, WireLimits
from triptych.core.limits import KEEP_ALIVE_S, MAX_CONNECTIONS
from triptych.core.options.config import Config

_OWN_DESCRIPTORS = 256  # models, logs, the store, children, sockets of the engine
_LATER_DESCRIPTORS = 24  # the minimum that is opened on demand
_ACCEPTED_AT_ONCE = 4  # in one turn of the loop
_BEING_REFUSED = 5 * _ACCEPTED_AT_ONCE  # a refused connection is open for some turns
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_log = logging.getLogger(__name__)
_CLOSE_S = 2  # for connections to close once nothing is in flight


class HttpServer:
    """A listening server. `serve` creates it and passes it to `on_started`."""

    def __init__(self, app: FastAPI, config: Config, listener: socket.socket) -> None:
        self._app = app
        self._options = config.server
        self._listener = listener
        self._uvicorn: uvicorn.Server | None = None

    @property
    def url(self) -> str:
        """The URL of the server."""
        return url_of(self._listener, self._options)

    @property
    def num_connections(self) -> int:
        """How many connections are open, busy or idle."""
        return 0 if self._uvicorn is None else len(self._uvicorn.server_state.connections)

    async def run(self, wire: WireLimits, on_started: Callable[[HttpServer], None]) -> None:
        """Serve until the server is stopped."""
        protocol = partial(GuardedProtocol, wire=wire, dialects=self._app.state.dialects)
        config = uvicorn.Config(
            self._app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a caller's X-Forwarded-For is not trusted
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=_CLOSE_S,
            backlog=_ACCEPTED_AT_ONCE,  # asyncio accepts this many per turn
        )
        config.load()
        config.ssl = tls_context(self._options)
        asyncio.get_running_loop().set_exception_handler(_LoopErrors())
        self._uvicorn = _Uvicorn(config, lambda: on_started(self))
        await self._uvicorn.serve(sockets=[self._listener])

    async def drain(self) -> None:
        """Refuse new requests, finish those in flight within `drain_timeout_s`, then stop.

        Unfinished requests end with a `draining` error. Probes are answered until the end;
        `/readyz` answers 503 from the start.
        """
        await self._app.state.in_flight.drain(self._options.drain_timeout_s)
        self.stop()

    def stop(self) -> None:
        """Stop now; requests in flight are aborted."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, with a callback once it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the calling process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `on_started`."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
        if self.started:
            self._on_started()


class _LoopErrors:
    """Logs errors of the event loop, and at most one line per second for failed accepts.

    Without resources, the loop retries every waiting connection each second: thousands of failures.
    """

    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        number = error.errno if isinstance(error, OSError) and "socket" in context else None
        if number not in _OUT_OF_RESOURCES:
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_s:
            self._next_s = loop.time() + 1.0
            _log.warning("connections cannot be accepted: %s", os.strerror(number))


async def serve(
    app: FastAPI,
    config: Config,
    *,
    on_started: Callable[[HttpServer], None],
    listener: socket.socket | None = None,
    wire: WireLimits | None = None,
) -> None:
    """Serve `app` until `drain` or `stop` of the `HttpServer` that `on_started` receives.

    `listener` is a socket from `bind`; the default binds one. Raises `ConfigError` if the port is
    in use.
    """
    server = HttpServer(app, config, listener or bind(config.server))
    await server.run(wire or _limits(config), on_started)


def _limits(config: Config) -> WireLimits:
    """Return the default limits, with no more connections than there are file descriptors for.

    A connection without a descriptor could be neither accepted nor refused, and would be retried
    forever.
    """
    num_free = raise_descriptor_limit()
    num_least = num_descriptors() + _LATER_DESCRIPTORS + _BEING_REFUSED
    num_own = min(_OWN_DESCRIPTORS, max(num_free // 2, num_least))
    num_connections = max(1, min(MAX_CONNECTIONS, num_free - num_own))
    if num_connections < MAX_CONNECTIONS:
        _log.warning(
            "limited to %d connections: this process may have %d open files (ulimit -n)",
            num_connections,
            num_free,
        )
    return WireLimits(linger_s=config.server.stream_timeout_s, num_connections=num_connections)


def num_descriptors() -> int:
    """Count the open descriptors of this process, on Linux and macOS."""
    return len(os.listdir("/dev/fd"))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors as far as needed and allowed; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft
