"""How much service each client of a model has received, and who is next.

Owns the account. Knows clients by name only: an API key, or a connection where there are no keys.

The client that received the least goes first (virtual token counters: Sheng et al., Fairness in
Serving Large Language Models, 2024). One that comes back from idling starts level with the least
served of those at work, and brings no credit. Nor does any client fall far behind: one that asked
for little all day would have hours to itself otherwise, and so would all that come meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Protocol, TypeVar

_MAX_REMEMBERED = 1024
_MOST_AHEAD = 64
"""So many of the longest pieces are the most by which one client can be ahead of another."""


class Ranked(Protocol):
    """A unit that waits."""

    @property
    def rank(self) -> tuple[int, int]:
        """Its priority, the most urgent first, and its place among those of the same."""
        ...

    @property
    def client(self) -> str:
        """Whose it is."""
        ...

    @property
    def num_tokens(self) -> int:
        """What it will take at least."""
        ...


RankedT = TypeVar("RankedT", bound=Ranked)


class ServiceShares:
    """Service received, in any one unit, by client."""

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        self._active: Counter[str] = Counter()
        self._level = 0.0
        self._most = 0.0
        self._longest = 0.0

    @property
    def is_contended(self) -> bool:
        """Whether more than one client has work here."""
        return len(self._active) > 1

    def received(self, client: str) -> float:
        """What a client has received, as far as it counts."""
        least = self._most - _MOST_AHEAD * self._longest
        return max(self._service.get(client, 0.0), least)

    def join(self, client: str) -> None:
        """A client has one more unit of work."""
        if client not in self._active:
            self._level = max(self._level, min(map(self.received, self._active), default=0.0))
            if len(self._service) >= _MAX_REMEMBERED:
                self._forget()
            self._service[client] = max(self.received(client), self._level)
        self._active[client] += 1

    def leave(self, client: str) -> None:
        """A client has one unit of work less."""
        self._active[client] -= 1
        if not self._active[client]:
            del self._active[client]
        if not self._active:
            self._service.clear()
            self._level = self._most = self._longest = 0.0

    def charge(self, client: str, amount: float) -> None:
        """A client receives so much."""
        self._longest = max(self._longest, amount)
        received = self._service[client] = self.received(client) + amount
        self._most = max(self._most, received)

    def in_turn(self, rows: Iterable[RankedT]) -> Iterator[RankedT]:
        """Rows that come in order of rank: those of one client stay so, and clients take turns.

        What is of higher priority (a lower first part of the rank) goes before everything else.
        """
        if not self.is_contended:
            yield from rows
            return
        by_client: dict[str, list[RankedT]] = {}
        for row in rows:
            by_client.setdefault(row.client, []).append(row)
        queues = [
            (own[0].rank[0], self.received(client), own[0].rank, 0, client)
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
        """Forget clients that left and whom it would give nothing to come back."""
        self._service = {
            client: received
            for client, received in self._service.items()
            if client in self._active or received > self._level
        }


def has_none(client: str, running: Iterable[Ranked]) -> bool:
    """Whether none of the units that run is the client's."""
    return all(unit.client != client for unit in running)


def spread(rows: Iterable[RankedT], most: int) -> list[RankedT]:
    """At most `most` of `rows`, one of each client in turn, in the order in which they come."""
    by_client: dict[str, list[RankedT]] = {}
    for row in rows:
        by_client.setdefault(row.client, []).append(row)
    longest = max(map(len, by_client.values()), default=0)
    turns = ([own[i] for own in by_client.values() if i < len(own)] for i in range(longest))
    return list(chain.from_iterable(turns))[:most]
