"""Chooses the replica that is predicted to finish a request first.

Owns the choice, and the record of requests in flight. All estimates are in seconds: the queued work
of the replica's device, minus the work saved by a cached prefix or adapter, plus the time to load
the model. So a request follows its prefix only while the saved work is worth the wait. Not
thread-safe.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Literal

from triptych.core.router.prefix_index import PrefixIndex
from triptych.core.router.report import LoadReport
from triptych.core.router.request import CUTS, RouteChoice, RoutedRequest

RoutingPolicy = Literal["predicted", "round-robin"]

UNKNOWN_JOB_S = 0.1
"""Estimate for a job of a model without measured jobs."""
UNKNOWN_TOKEN_S = 1e-5
ADAPTER_S = 0.01
"""Seconds saved by a replica that recently ran the request's adapter."""
OTHERS_WEIGHT = 2.0
"""Saved seconds count once for the request, and with this weight for other requests: for those that
would wait behind its work, and for prefixes that a second copy would evict. For other requests they
count up to the work of one job, since long prompts would otherwise wait longest."""
MODEL_S = 10.0
"""Estimate for loading a model that is not in memory."""

_MAX_HOLDERS = 8  # candidates with a cached prefix, in addition to the least busy replica
_KEYS_PER_REPLICA = 4096
_MAX_ADAPTER_KEYS = 4096
_SPARE_SLOTS = 64


class _Replica:
    """The router's state of one replica."""

    __slots__ = ("load_s", "name", "own_s", "report", "reported_own_s", "slot", "tie")

    def __init__(self, name: str, slot: int, tie: float) -> None:
        self.name = name
        self.slot = slot
        self.tie = tie  # breaks ties; differs between routers
        self.report = LoadReport()
        self.load_s = 0.0
        self.own_s = 0.0
        self.reported_own_s = 0.0

    def refresh(self) -> None:
        """Update the load: the report, plus requests that began and ended since."""
        since_s = self.own_s - self.reported_own_s
        self.load_s = max(0.0, self.report.backlog_s + since_s)

    def token_s(self, model: str) -> float:
        """Return the seconds per prompt token."""
        return self.report.token_s.get(model, UNKNOWN_TOKEN_S)

    def job_s(self, model: str) -> float:
        """Return the seconds per job."""
        return self.report.job_s.get(model, UNKNOWN_JOB_S)

    def worth_s(self, num_held: float, model: str) -> float:
        """Return the seconds of waiting that `num_held` cached tokens are worth."""
        saved_s = num_held * self.token_s(model)
        return saved_s + OTHERS_WEIGHT * min(saved_s, self.job_s(model))


class ReplicaRouter:
    """Chooses among the current replicas.

    `choose` only reads; `begin` and `end` record requests in flight.
    """

    def __init__(self, policy: RoutingPolicy = "predicted", *, seed: int | None = None) -> None:
        self._policy = policy
        self._random = random.Random(seed)  # noqa: S311 - for ties
        self._replicas: dict[str, _Replica] = {}
        self._by_slot: dict[int, _Replica] = {}
        self._num_slots = 0
        self._alive = 0
        self._heap: list[tuple[float, float, str]] = []
        self._prefixes = PrefixIndex(0)
        self._adapters: dict[int, int] = {}
        self._in_flight: dict[str, tuple[_Replica, float]] = {}
        self._num_chosen = 0

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    @property
    def names(self) -> Collection[str]:
        """The names of the current replicas."""
        return self._replicas.keys()

    def load_s(self, name: str) -> float:
        """Return the seconds of work queued on this replica."""
        return self._replicas[name].load_s

    def update(self, names: Collection[str]) -> None:
        """Set the current replicas."""
        for name in [name for name in self._replicas if name not in names]:
            self.remove(name)
        for name in names:
            if name not in self._replicas:
                self._add(name)

    def remove(self, name: str) -> None:
        """Remove a replica that is dead or draining."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            del self._by_slot[replica.slot]
            self._alive &= ~(1 << replica.slot)
            self._prefixes.forget(replica.slot)
            self._resize(-replica.report.cache_tokens)

    def report(self, name: str, report: LoadReport) -> None:
        """Store a replica's report; those of removed replicas are ignored."""
        replica = self._replicas.get(name)
        if replica is not None and report != replica.report:
            self._resize(report.cache_tokens - replica.report.cache_tokens)
            replica.report, replica.reported_own_s = report, replica.own_s
            self._move(replica)

    def choose(self, request: RoutedRequest) -> RouteChoice | None:
        """Return the choice for a request; `None` without replicas.

        A replica that the request avoids is chosen only if there is no other.
        """
        if self._policy == "round-robin":
            return self._next_in_turn(request.avoided)
        least = self._least(request.avoided)
        if least is None:
            return None
        masks = self._prefixes.holders(request.keys)
        best, best_s = least, self._done_s(least, request, masks)
        for replica in self._holders(request, masks):
            done_s = self._done_s(replica, request, masks)
            if done_s < best_s and replica.name not in request.avoided:
                best, best_s = replica, done_s
        held = _held_tokens(best, request, masks)
        saved_s = held * best.token_s(request.model)
        return RouteChoice(best.name, best.load_s, least.load_s, int(held), saved_s)

    def begin(self, request_id: str, choice: RouteChoice, request: RoutedRequest) -> None:
        """Record that a request was sent to a replica."""
        replica = self._replicas.get(choice.replica)
        if replica is None:
            return
        seconds = replica.job_s(request.model)
        self._in_flight[request_id] = replica, seconds
        replica.own_s += seconds
        self._move(replica)
        self._prefixes.add(request.keys, replica.slot)
        if request.adapter:
            self._adapters[request.adapter] = (
                self._adapters.pop(request.adapter, 0) | 1 << replica.slot
            )
            if len(self._adapters) > _MAX_ADAPTER_KEYS:
                del self._adapters[next(iter(self._adapters))]

    def end(self, request_id: str) -> None:
        """Record the end of a request; unknown ones are ignored."""
        found = self._in_flight.pop(request_id, None)
        if found is not None:
            replica, seconds = found
            replica.own_s -= seconds
            if replica.name in self._replicas:
                self._move(replica)

    def _add(self, name: str) -> None:
        if self._num_slots > 2 * len(self._replicas) + _SPARE_SLOTS:
            self._forget_slots()
        replica = _Replica(name, self._num_slots, self._random.random())
        self._num_slots += 1
        self._replicas[name] = self._by_slot[replica.slot] = replica
        self._alive |= 1 << replica.slot
        self._resize(0)
        self._move(replica)

    def _forget_slots(self) -> None:
        """Renumber the replicas after many changes; their prefixes are learned again."""
        self._prefixes.clear()
        self._adapters.clear()
        self._num_slots = len(self._replicas)
        self._by_slot = dict(enumerate(self._replicas.values()))
        self._alive = (1 << self._num_slots) - 1
        for slot, replica in self._by_slot.items():
            replica.slot = slot

    def _resize(self, num_tokens: int) -> None:
        """Add to the total cache capacity, which avoids a sum over all replicas."""
        self._prefixes.max_keys = _KEYS_PER_REPLICA * len(self._replicas)
        self._prefixes.capacity_tokens += num_tokens

    def _move(self, replica: _Replica) -> None:
        """Push a replica's new load to the heap; its older entries become stale."""
        replica.refresh()
        if len(self._heap) > 4 * len(self._replicas) + _SPARE_SLOTS:
            self._heap = [(each.load_s, each.tie, each.name) for each in self._replicas.values()]
            heapify(self._heap)
        else:
            heappush(self._heap, (replica.load_s, replica.tie, replica.name))

    def _least(self, avoided: Collection[str]) -> _Replica | None:
        """Return the least busy replica, not an avoided one if there are others."""
        if avoided:
            others = [each for each in self._replicas.values() if each.name not in avoided]
            if others:
                return min(others, key=lambda each: each.load_s)
        while self._heap:
            load_s, _, name = self._heap[0]
            replica = self._replicas.get(name)
            if replica is not None and replica.load_s == load_s:
                return replica
            heappop(self._heap)
        return None

    def _holders(self, request: RoutedRequest, masks: Sequence[int]) -> Iterator[_Replica]:
        """Yield some replicas with a cached prefix or the adapter, the longest prefix first."""
        seen = 0
        for mask in (*reversed(masks), self._adapters.get(request.adapter, 0)):
            left = mask & self._alive & ~seen
            while left:
                bit = left & -left
                left ^= bit
                seen |= bit
                yield self._by_slot[bit.bit_length() - 1]
                if seen.bit_count() >= _MAX_HOLDERS:
                    return

    def _done_s(self, replica: _Replica, request: RoutedRequest, masks: Sequence[int]) -> float:
        """Estimate the seconds until the request is done, without terms equal for all replicas."""
        report, bit = replica.report, 1 << replica.slot
        done_s = replica.load_s
        if report.ready and request.model not in report.ready:
            done_s += MODEL_S
        if self._adapters.get(request.adapter, 0) & bit:
            done_s -= ADAPTER_S
        held = _held_tokens(replica, request, masks)
        return done_s - replica.worth_s(held, request.model) if held else done_s

    def _next_in_turn(self, avoided: Collection[str]) -> RouteChoice | None:
        names = [name for name in self._replicas if name not in avoided] or list(self._replicas)
        if not names:
            return None
        self._num_chosen += 1
        name = names[self._num_chosen % len(names)]
        return RouteChoice(name, self._replicas[name].load_s)


def _held_tokens(replica: _Replica, request: RoutedRequest, masks: Sequence[int]) -> float:
    """Estimate the tokens of the prompt that are cached there."""
    bit = 1 << replica.slot
    for level in range(len(masks) - 1, -1, -1):
        if masks[level] & bit:
            return _num_held(request, level)
    return 0.0


def _num_held(request: RoutedRequest, level: int) -> float:
    """Estimate the cached tokens at this level: its own, and half of those to the next one."""
    beyond = CUTS[level + 1] if level + 1 < len(CUTS) else request.num_tokens
    return (CUTS[level] + min(beyond, request.num_tokens)) / 2
