"""Early ends of a request, for streaming and other routes alike.

A request ends early if its client disconnects or stops reading, its time limit passes, or the
server shuts down. Each cancels the task that answers it, and through it the jobs it waits for.
Knows no route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.core.errors import Draining, RequestTimeout, TriptychError
from triptych.core.http.auth import OWN_PRINCIPAL, PUBLIC_ROUTES
from triptych.core.http.errors import error_answer
from triptych.core.options.config import ServerOptions

CLIENT_GONE = 499
"""As nginx logs a client that has left; it is never sent."""
_GOODBYE_S = 1.0  # for a closed connection to be reported, and for final errors on a drain


class DisconnectWatcher:
    """Watches the client of one request, in place of the server's `receive` and `send`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_s: float) -> None:
        self._receive = receive
        self._send = send
        self._stall_s = stall_s
        self._abort: Callable[[], None] | None = scope["state"].get("abort_connection")
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()
        self._is_answered = False
        self._is_aborted = False
        self.is_asking = scope["method"] == "POST" and OWN_PRINCIPAL not in scope
        self.is_started = False
        self.is_cut = False
        self.time_limit: asyncio.TimerHandle | None = None
        self.reason: TriptychError | None = None

    def cut(self, reason: TriptychError | None) -> None:
        """End the request. `reason` is sent to the client; `None` if it has disconnected."""
        if not self.is_cut and self._task is not None:
            self.is_cut, self.reason = True, reason
            self._task.cancel()

    def lift_limit(self) -> None:
        """Remove the time limit, for a stream without an end."""
        if self.time_limit is not None:
            self.time_limit.cancel()

    def take_reason(self) -> TriptychError | None:
        """Return the reason for the client if `cut` caused the current cancellation."""
        if not self.is_cut or self.reason is None or self._task is None:
            return None
        reason, self.reason = self.reason, None
        self._task.uncancel()
        return reason

    async def receive(self) -> Message:
        """Receive the next part of the body; after the last, watch the client."""
        if self._watcher is not None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
            self.cut(None)
            await asyncio.sleep(0)  # the cancellation is raised here
        elif not message.get("more_body", False):
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        """Send a message. A client that does not read it in time is disconnected."""
        self.is_started = True
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            if self._abort is not None:
                self._is_aborted = True
                self._abort()
            self.cut(None)
            await self._gone.wait()

    async def abort(self) -> bool:
        """Close the connection, if any, so that the client sees a failure. Nothing may follow."""
        if self._abort is None:
            return False
        self._is_aborted = self._is_answered = True
        self._abort()
        if self._watcher is not None:
            await self._gone.wait()
        return True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if not self._is_answered:
            self.cut(None)

    async def close(self) -> None:
        """Stop watching: nothing can end the request early any more."""
        self._task = None
        if self._watcher is not None:
            if self._is_aborted:  # the server must know it before this task ends
                await asyncio.wait((self._watcher,), timeout=_GOODBYE_S)
            self._watcher.cancel()


class Cuttable(Protocol):
    """Work that a drain waits for. If it `is_asking`, a client waits for it."""

    @property
    def is_asking(self) -> bool:
        """Whether batches wait for it."""
        ...

    def cut(self, reason: TriptychError | None) -> None:
        """End the work for this reason."""
        ...


class InFlight:
    """The requests and other work in progress, and whether the server is draining."""

    def __init__(self) -> None:
        self._watchers: set[Cuttable] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._num_asking = 0
        self.quiet = asyncio.Event()
        """Set while no client waits for work; the server's own requests do not count."""
        self.quiet.set()
        self.draining = asyncio.Event()
        """Set when the drain begins, for work that can end itself early."""

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self.draining.is_set()

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, watcher: Cuttable) -> None:
        """Add a request that has begun."""
        self._watchers.add(watcher)
        self._is_empty.clear()
        self._num_asking += watcher.is_asking
        if watcher.is_asking:
            self.quiet.clear()

    def remove(self, watcher: Cuttable) -> None:
        """Remove a request that has ended."""
        self._watchers.discard(watcher)
        self._num_asking -= watcher.is_asking
        if not self._num_asking:
            self.quiet.set()
        if not self._watchers:
            self._is_empty.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, wait for those in flight, and end the rest with an error."""
        self.draining.set()
        if not await self._wait_empty(timeout_s):
            for watcher in tuple(self._watchers):
                watcher.cut(Draining("The server shut down before this answer was complete."))
            await self._wait_empty(_GOODBYE_S)

    async def _wait_empty(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


class FollowClient:
    """ASGI middleware: watches the client of every request."""

    def __init__(self, app: ASGIApp, options: ServerOptions, in_flight: InFlight) -> None:
        self._app = app
        self._options = options
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it while draining."""
        if scope["type"] != "http" or (scope["method"], scope["path"]) in PUBLIC_ROUTES:
            await self._app(scope, receive, send)  # probes are also answered while draining
        elif self._in_flight.is_draining:
            error = Draining("The server is shutting down.", retry_after_s=_GOODBYE_S)
            response = error_answer(error, scope)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self._follow(scope, receive, send)

    async def _follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = DisconnectWatcher(scope, receive, send, self._options.stream_timeout_s)
        limit_s = self._options.request_timeout_s
        late = RequestTimeout(f"The answer was not complete within {limit_s:g} s.")
        if OWN_PRINCIPAL not in scope:  # a batch has a window for all of its lines
            watcher.time_limit = asyncio.get_running_loop().call_later(limit_s, watcher.cut, late)
        scope["state"]["watcher"] = watcher
        scope["state"]["arrived_s"] = time.monotonic()
        self._in_flight.add(watcher)
        try:
            await self._app(scope, watcher.receive, watcher.send)
        except asyncio.CancelledError:
            if not watcher.is_cut:
                raise  # the server itself is stopping
            reason = watcher.take_reason()
            if reason is not None and not watcher.is_started:
                await error_answer(reason, scope)(scope, watcher.receive, watcher.send)
            else:
                scope["state"]["is_gone"] = True
        finally:
            watcher.lift_limit()
            self._in_flight.remove(watcher)
            await watcher.close()


def recorded_status(scope: Scope, sent: int) -> int:
    """Return the status of a response for records: 499 if its client left before the end."""
    return CLIENT_GONE if scope["state"].get("is_gone") else sent
