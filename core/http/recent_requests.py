"""The recent requests of callers, by the ids in their responses.

Owns a bounded list of POST requests, the oldest dropped first. A caller's own id may be used twice:
the latest request counts. Knows no bodies and no jobs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_REQUESTS = 4096


@dataclass(slots=True, kw_only=True)
class RecentRequest:
    """A request that arrived at `arrived_s` (monotonic), and its response, once it is sent."""

    call_id: str
    state: Mapping[str, Any]
    arrived_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    route: str = ""
    status: int | None = None

    @property
    def owner(self) -> str:
        """The owner of the key that it was sent with."""
        return str(self.state["principal"].owner)

    def end(self, route: str, status: int) -> None:
        """Record the end of the response."""
        self.ended_s, self.route, self.status = time.monotonic(), route, status
        self.state = {"principal": self.state["principal"]}  # the rest may be large


class RecentRequests:
    """The recent requests, by owner and id."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._requests: dict[str, RecentRequest] = {}

    def add(self, state: Mapping[str, Any]) -> RecentRequest:
        """Add a request with the ids in its `state`."""
        request = RecentRequest(call_id=state["call_id"], state=state)
        self._requests.pop(state["request_id"], None)  # the order is that of arrival
        self._requests[state["request_id"]] = request
        if len(self._requests) > self._max_requests:
            del self._requests[next(iter(self._requests))]
        return request

    def find(self, request_id: str, owner: str) -> RecentRequest | None:
        """Return the latest request of this id, if it is the owner's."""
        found = self._requests.get(request_id)
        return found if found is not None and found.owner == owner else None
