"""The recent requests of callers, by the ids in their responses.

Owns a bounded list of requests that may have work for a model (POST, a WebSocket, an answer inside
one) for each owner of a key, the oldest dropped first, and the layer that fills it behind the
authentication: no caller can displace the requests of another. An owner's own id may be used twice:
the latest request counts. Knows no bodies and no jobs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_REQUESTS = 4096
"""The bound for each owner; there are as many owners as configured keys."""


@dataclass(slots=True, kw_only=True)
class RecentRequest:
    """A request that arrived at `arrived_s` (monotonic), and its response, once it is sent."""

    call_id: str
    arrived_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    route: str = ""
    status: int | None = None

    def end(self, route: str, status: int) -> None:
        """Record the end of the response."""
        self.ended_s, self.route, self.status = time.monotonic(), route, status


class RecentRequests:
    """The recent requests, by owner and id."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: dict[str, dict[str, RecentRequest]] = {}

    def add(self, owner: str, request_id: str, call_id: str) -> RecentRequest:
        """Add a request."""
        request = RecentRequest(call_id=call_id)
        owned = self._requests.setdefault(owner, {})
        owned.pop(request_id, None)  # the order is that of arrival
        owned[request_id] = request
        if len(owned) > self._max_requests:
            del owned[next(iter(owned))]
        return request

    def rename(self, owner: str, request_id: str, new_id: str) -> None:
        """Let a request be found by another id."""
        owned = self._requests.get(owner, {})
        if (request := owned.pop(request_id, None)) is not None:
            owned[new_id] = request

    def find(self, request_id: str, owner: str) -> RecentRequest | None:
        """Return the owner's latest request of this id."""
        return self._requests.get(owner, {}).get(request_id)


def may_have_work(scope: Scope) -> bool:
    """Whether a request may have work for a model: POST, or a WebSocket."""
    return scope["type"] == "http" and (scope["method"] == "POST" or "upgrade" in scope["state"])


class RecordRequests:
    """ASGI middleware: adds requests that may have work, as `recent_request` of `scope["state"]`.

    It stands behind `RequireKey`, which sets the principal.
    """

    def __init__(self, app: ASGIApp, recent: RecentRequests) -> None:
        self._app = app
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if may_have_work(scope):
            state = scope["state"]
            state["recent_request"] = self._recent.add(
                state["principal"].owner, state["request_id"], state["call_id"]
            )
        await self._app(scope, receive, send)
