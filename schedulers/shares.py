"""How much service each client of a model has received, and whose turn is next.

Owns the account. Knows clients by name only: an API key, or a connection where there are no keys.

The client that received the least goes first (virtual token counters: Sheng et al., Fairness in
Serving Large Language Models, 2024). A client that returns from idling starts level with the least
served active one, without credit. Credit is also bounded: otherwise a client with few requests all
day could claim the device for hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Protocol, TypeVar

_MAX_REMEMBERED = 1024
_MOST_AHEAD = 64
"""The greatest lead of one client over another, in pieces of the longest size."""


class Ranked(Protocol):
    """A waiting unit."""

    @property
    def rank(self) -> tuple[int, int]:
        """Its priority, most urgent first, and its place among units of that priority."""
        ...

    @property
    def client(self) -> str:
        """The client that it belongs to."""
        ...

    @property
    def num_tokens(self) -> int:
        """The least service that it will take."""
        ...


RankedT = TypeVar("RankedT", bound=Ranked)


class ServiceShares:
    """Service received by each client, in any one unit of measure."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._level = 0.0
        self._most = 0.0
        self._longest = 0.0

    @property
    def is_contended(self) -> bool:
        """Whether more than one client has work."""
        return len(self._active) > 1

    def service_of(self, client: str) -> float:
        """The service that a client received, raised to bound its credit."""
        return max(self._service.get(client, 0.0), self._least)

    @property
    def _least(self) -> float:
        return self._most - _MOST_AHEAD * self._longest

    def join(self, client: str) -> None:
        """Add a unit of work to a client."""
        if client not in self._active:
            self._level = max(self._level, min(map(self.service_of, self._active), default=0.0))
            if len(self._service) >= _MAX_REMEMBERED:
                self._forget()
            self._service[client] = max(self.service_of(client), self._level)
        self._active[client] += 1

    def leave(self, client: str) -> None:
        """Remove a unit of work from a client."""
        self._active[client] -= 1
        if not self._active[client]:
            del self._active[client]
        if not self._active:
            self._service.clear()
            self._level = self._most = self._longest = 0.0

    def charge(self, client: str, *amounts: float) -> None:
        """Add service to a client's account, in one piece or several.

        The first piece alone limits the credit: with it, the client is within the limit.
        """
        self._longest = max(self._longest, amounts[0])
        received = self._service[client] = self.service_of(client) + sum(amounts)
        self._longest = max(self._longest, *amounts)
        self._most = max(self._most, received)

    def in_turn(self, rows: Iterable[RankedT]) -> Iterator[RankedT]:
        """Merge rows in order of rank: rows of one client keep their order, clients take turns.

        Rows of higher priority (a lower first part of the rank) precede all others.
        """
        if not self.is_contended:
            yield from rows
            return
        by_client: dict[str, list[RankedT]] = {}
        for row in rows:
            by_client.setdefault(row.client, []).append(row)
        service, least = self._service, self._least
        queues = [
            (own[0].rank[0], max(service.get(client, 0.0), least), own[0].rank, 0, client)
            for client, own in by_client.items()
        ]
        heapify(queues)
        while queues:
            _, received, _, place, client = queues[0]
            own = by_client[client]
            yield own[place]
            if place + 1 == len(own):
                heappop(queues)
            else:
                received += own[place].num_tokens
                after = own[place + 1]
                heapreplace(queues, (after.rank[0], received, after.rank, place + 1, client))

    def _forget(self) -> None:
        """Forget inactive clients without service above the level at which they would return."""
        self._service = {
            client: received
            for client, received in self._service.items()
            if client in self._active or received > self._level
        }


def none_running(client: str, running: Iterable[Ranked]) -> bool:
    """Whether no running unit belongs to the client."""
    return all(unit.client != client for unit in running)


def round_robin(rows: Iterable[RankedT], most: int) -> list[RankedT]:
    """At most `most` of `rows`, one of each client in turn, in their order."""
    by_client: dict[str, list[RankedT]] = {}
    for row in rows:
        by_client.setdefault(row.client, []).append(row)
    longest = max(map(len, by_client.values()), default=0)
    turns = ([own[i] for own in by_client.values() if i < len(own)] for i in range(longest))
    return list(chain.from_iterable(turns))[:most]
