"""Which replica gets a request: the one where it is predicted to be done first.

Owns the choice, and the account of what was sent where. Everything is in seconds: the work before a
request on a replica's device, less what is saved by what the replica holds (a beginning of the
prompt, an adapter), plus what it must load first. So a request follows its prefix only as far as
the work spared is worth the wait. Belongs to one thread.
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
"""What a job counts for of a model whose jobs were not timed yet."""
UNKNOWN_TOKEN_S = 1e-5
ADAPTER_S = 0.01
"""What a replica saves that ran a request's adapter lately."""
OTHERS_WEIGHT = 2.0
"""What is saved counts once for the request itself, and so often for others: for those that would
wait behind its work, and for the prefixes that would give way to a second copy. For others it
counts up to the work of one job, or long prompts would wait longest."""
MODEL_S = 10.0
"""What it takes to load a model that is not in memory."""

_MAX_HOLDERS = 8  # looked at of those that hold a prefix, besides the one with least to do
_KEYS_PER_REPLICA = 4096
_MAX_ADAPTER_KEYS = 4096
_SPARE_SLOTS = 64


class _Replica:
    """What is known of one replica."""

    __slots__ = ("load_s", "name", "own_s", "report", "reported_own_s", "slot", "tie")

    def __init__(self, name: str, slot: int, tie: float) -> None:
        self.name = name
        self.slot = slot
        self.tie = tie  # of several routers each has its own order of equals
        self.report = LoadReport()
        self.load_s = 0.0
        self.own_s = 0.0
        self.reported_own_s = 0.0

    def refresh(self) -> None:
        """The load: as reported, and what this router has added to it or seen ended since."""
        since_s = self.own_s - self.reported_own_s
        self.load_s = max(0.0, self.report.backlog_s + since_s)

    def token_s(self, model: str) -> float:
        """Seconds of a prompt's token."""
        return self.report.token_s.get(model, UNKNOWN_TOKEN_S)

    def job_s(self, model: str) -> float:
        """Seconds of a job."""
        return self.report.job_s.get(model, UNKNOWN_JOB_S)

    def worth_s(self, num_held: float, model: str) -> float:
        """The seconds of waiting that so many cached tokens are worth."""
        saved_s = num_held * self.token_s(model)
        return saved_s + OTHERS_WEIGHT * min(saved_s, self.job_s(model))


class ReplicaRouter:
    """Chooses among the replicas that were added and not removed.

    `choose` reads; `begin` and `end` keep the account of what was really sent.
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
        """The replicas that may be chosen."""
        return self._replicas.keys()

    def load_s(self, name: str) -> float:
        """Seconds of work before a request that goes to this replica now."""
        return self._replicas[name].load_s

    def update(self, names: Collection[str]) -> None:
        """These are the replicas, and no others."""
        for name in [name for name in self._replicas if name not in names]:
            self.remove(name)
        for name in names:
            if name not in self._replicas:
                self._add(name)

    def remove(self, name: str) -> None:
        """A replica is dead, or drains: it gets nothing more."""
        replica = self._replicas.pop(name, None)
        if replica is not None:
            del self._by_slot[replica.slot]
            self._alive &= ~(1 << replica.slot)
            self._prefixes.forget(replica.slot)
            self._resize(-replica.report.cache_tokens)

    def report(self, name: str, report: LoadReport) -> None:
        """What a replica says of itself; of one that is not there any more it is ignored."""
        replica = self._replicas.get(name)
        if replica is not None and report != replica.report:
            self._resize(report.cache_tokens - replica.report.cache_tokens)
            replica.report, replica.reported_own_s = report, replica.own_s
            self._move(replica)

    def choose(self, request: RoutedRequest) -> RouteChoice | None:
        """The replica for a request, and why; `None` where there is none.

        One that the request avoids is taken only where there is no other.
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
        """A request was sent to a replica."""
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
        """A request is over, well or not; an unknown one is ignored."""
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
        """Number the replicas anew, after many have come and gone: what they hold is learned."""
        self._prefixes.clear()
        self._adapters.clear()
        self._num_slots = len(self._replicas)
        self._by_slot = dict(enumerate(self._replicas.values()))
        self._alive = (1 << self._num_slots) - 1
        for slot, replica in self._by_slot.items():
            replica.slot = slot

    def _resize(self, num_tokens: int) -> None:
        """The caches together hold so many tokens more; a sum anew would be over all replicas."""
        self._prefixes.max_keys = _KEYS_PER_REPLICA * len(self._replicas)
        self._prefixes.capacity_tokens += num_tokens

    def _move(self, replica: _Replica) -> None:
        """A replica's load has changed: what the heap has of it before is out of date."""
        replica.refresh()
        if len(self._heap) > 4 * len(self._replicas) + _SPARE_SLOTS:
            self._heap = [(each.load_s, each.tie, each.name) for each in self._replicas.values()]
            heapify(self._heap)
        else:
            heappush(self._heap, (replica.load_s, replica.tie, replica.name))

    def _least(self, avoided: Collection[str]) -> _Replica | None:
        """The replica with least to do, of those that are not avoided if there are any."""
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
        """Some that hold most of the prompt, or the adapter; those with the longest part first."""
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
        """Seconds until a request would be done there, less what is alike everywhere."""
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
    """Tokens of the prompt that are likely to be cached there."""
    bit = 1 << replica.slot
    for level in range(len(masks) - 1, -1, -1):
        if masks[level] & bit:
            return _num_held(request, level)
    return 0.0


def _num_held(request: RoutedRequest, level: int) -> float:
    """Tokens likely to be held where this level is: its own, and half of those to the next one."""
    beyond = CUTS[level + 1] if level + 1 < len(CUTS) else request.num_tokens
    return (CUTS[level] + min(beyond, request.num_tokens)) / 2
