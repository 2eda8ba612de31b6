"""The adapters in memory, and the rows that use or wait for them.

Owns the slots: which adapter has which, which loads, and which gives way. An adapter is known by
the digest of its content. Its rows are counted from their submission until no step in flight uses
them, and until then it stays. A row whose adapter has no slot waits in order of arrival; rows whose
adapters are in memory may overtake it, but only `_MAX_OVERTAKEN` times. Knows no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

from triptych.core.engine_api.job import Job, JobState
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad, TokenRequest
from triptych.core.errors import (
    MemoryBudgetExceeded,
    ModelTooLarge,
    Overloaded,
    TriptychError,
)
from triptych.schedulers.executors import Post
from triptych.schedulers.side_jobs import Start, error_of_load, finish, start_thread
from triptych.schedulers.tokens.state import SequenceState

_MAX_OVERTAKEN = 16  # times that later rows overtake one whose adapter has no slot
_MAX_LOOKAHEAD = 128  # waiting rows considered at a time
_RETRY_S = 2.0


class AdapterLoader(Protocol):
    """The memory of adapters: `core.runtime.engine.adapter_store.AdapterStore`."""

    num_slots: int

    def load(self, place: str, digest: str, slot: int) -> None:
        """Load an adapter into an empty slot, on any thread. Raises `SetupError`."""

    def drop(self, slot: int) -> None:
        """Empty a slot that no step in flight uses."""


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter with a slot: ready, or still loading."""

    digest: str
    place: str
    slot: int
    order: int
    is_ready: bool = False
    rows: set[SequenceState] = field(default_factory=set)
    loads: list[Job] = field(default_factory=list)
    drops: list[Job] = field(default_factory=list)
    last_used: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether it may give way."""
        return self.is_ready and not self.rows

    def end_drops(self) -> None:
        """End the jobs that drop it."""
        drops, self.drops = self.drops, []
        for job in drops:
            finish(job)


class AdapterPool:
    """The adapters of one model. All methods run on the loop's thread.

    `policy` chooses which idle adapter gives way, lru or fifo. `on_ready` receives the rows whose
    adapter is there, `on_failed` a row and the error that keeps its adapter away.
    """

    def __init__(
        self, loader: AdapterLoader, *, policy: str = "lru", start: Start = start_thread
    ) -> None:
        self.on_ready: Callable[[], None] = lambda: None
        self.on_failed: Callable[[SequenceState, TriptychError], None] = lambda row, error: None
        self._loader, self._policy, self._start = loader, policy, start
        self._post: Post = lambda call: call()
        self._adapters: dict[str, _Adapter] = {}
        self._free_slots = list(range(loader.num_slots))[::-1]
        self._waiting: OrderedDict[int, SequenceState | Job] = OrderedDict()
        self._unwanted: set[str] = set()
        """Digests of adapters that were dropped, or will be when they are idle."""
        self._num_overtaken = 0
        self._turn = 0

    def connect(self, post: Post) -> None:
        """Register the function that posts calls to the loop's thread."""
        self._post = post

    def gauges(self) -> dict[str, float]:
        """The current counts."""
        return {
            "adapters": sum(each.is_ready for each in self._adapters.values()),
            "adapters_waiting": len(self._waiting),
        }

    def join(self, row: SequenceState) -> None:
        """Give a new row its adapter, or let it wait. It calls `leave` at its end."""
        row.awaits_adapter = True
        self._wait(row)

    def leave(self, row: SequenceState) -> None:
        """Forget a row that has ended and is in no step in flight; a second call does nothing."""
        self._waiting.pop(id(row), None)
        adapter = self._adapters.get(row.request.adapter)
        if adapter is not None and row in adapter.rows:
            adapter.rows.remove(row)
            self._turn += 1
            adapter.last_used = self._turn
            self._drop_if_unwanted(adapter)
        self._advance()

    def load(self, job: Job[AdapterLoad]) -> None:
        """Load an adapter; the job ends when it is in memory, or with the error.

        Drops of it that wait for rows end now, without effect.
        """
        job.state = JobState.RUNNING
        self._unwanted.discard(job.request.digest)
        if (adapter := self._adapters.get(job.request.digest)) is not None:
            adapter.end_drops()
        self._wait(job)

    def drop(self, job: Job[AdapterDrop]) -> None:
        """Drop an adapter once its rows have ended; then the job ends."""
        job.state = JobState.RUNNING
        self._unwanted.add(job.request.digest)
        adapter = self._adapters.get(job.request.digest)
        if adapter is None:
            finish(job)
            return
        adapter.drops.append(job)
        self._drop_if_unwanted(adapter)
        self._advance()

    def check(self) -> None:
        """Assert that every slot has one adapter or none, and that rows have what they use."""
        used = [each.slot for each in self._adapters.values()]
        assert sorted(used + self._free_slots) == list(range(self._loader.num_slots))
        for adapter in self._adapters.values():
            for row in adapter.rows:
                assert row.request.adapter == adapter.digest
                assert row.adapter_slot == (adapter.slot if adapter.is_ready else -1)
                assert row.awaits_adapter is not adapter.is_ready

    def _wait(self, waiting: SequenceState | Job) -> None:
        self._waiting[id(waiting)] = waiting
        self._advance()

    def _advance(self) -> None:
        """Give slots to those that wait, in order, as far as there are any."""
        while self._waiting and self._give(next(iter(self._waiting.values()))):
            self._waiting.popitem(last=False)
            self._num_overtaken = 0
        # The first has no slot; those whose adapters have one may overtake it.
        for each in tuple(islice(self._waiting.values(), 1, _MAX_LOOKAHEAD)):
            if self._num_overtaken >= _MAX_OVERTAKEN:
                return
            if _adapter_of(each)[0] in self._adapters and self._give(each):
                del self._waiting[id(each)]
                self._num_overtaken += 1

    def _give(self, waiting: SequenceState | Job) -> bool:
        """Give a row or a load its adapter; false if no slot is free."""
        digest, place = _adapter_of(waiting)
        adapter = self._adapters.get(digest) or self._begin(digest, place)
        if adapter is None:
            return False
        if isinstance(waiting, SequenceState):
            adapter.rows.add(waiting)
            if adapter.is_ready:
                self._equip(waiting, adapter)
                self.on_ready()
            return True
        if adapter.is_ready:
            finish(waiting)
        else:
            adapter.loads.append(waiting)
        return True

    def _begin(self, digest: str, place: str) -> _Adapter | None:
        """Begin to load an adapter; `None` if no slot is free."""
        if not self._free_slots and not self._evict():
            return None
        self._turn += 1
        adapter = _Adapter(digest, place, self._free_slots.pop(), self._turn, last_used=self._turn)
        self._adapters[digest] = adapter
        self._start(partial(self._load, adapter))
        return adapter

    def _evict(self) -> bool:
        """Drop the adapter that gives way; false if all are in use."""
        idle = [each for each in self._adapters.values() if each.is_idle]
        if not idle:
            return False
        is_fifo = self._policy == "fifo"
        self._drop(min(idle, key=lambda each: each.order if is_fifo else each.last_used))
        return True

    def _drop_if_unwanted(self, adapter: _Adapter) -> None:
        if adapter.is_idle and adapter.digest in self._unwanted:
            self._drop(adapter)

    def _drop(self, adapter: _Adapter) -> None:
        del self._adapters[adapter.digest]
        self._loader.drop(adapter.slot)
        self._free_slots.append(adapter.slot)
        adapter.end_drops()

    def _load(self, adapter: _Adapter) -> None:
        """On a thread of its own: load, and post the outcome."""
        load = partial(self._loader.load, adapter.place, adapter.digest, adapter.slot)
        self._post(partial(self._settle, adapter, error_of_load(load)))

    def _settle(self, adapter: _Adapter, error: TriptychError | None) -> None:
        """Give a loaded adapter to those that wait for it, or the error."""
        if isinstance(error, MemoryBudgetExceeded) and not isinstance(error, ModelTooLarge):
            if self._evict():
                self._start(partial(self._load, adapter))
                return
            error = Overloaded(
                "The adapter does not fit next to those in use; try again later.",
                retry_after_s=_RETRY_S,
            )
        if error is not None:
            self._fail(adapter, error)
        else:
            adapter.is_ready = True
            for row in adapter.rows:
                self._equip(row, adapter)
            loads, adapter.loads = adapter.loads, []
            for job in loads:
                finish(job)
            self._drop_if_unwanted(adapter)
        self._advance()
        self.on_ready()

    def _fail(self, adapter: _Adapter, error: TriptychError) -> None:
        del self._adapters[adapter.digest]
        self._free_slots.append(adapter.slot)
        for job in adapter.loads:
            finish(job, error)
        adapter.end_drops()
        for row in tuple(adapter.rows):
            self.on_failed(row, error)

    @staticmethod
    def _equip(row: SequenceState, adapter: _Adapter) -> None:
        row.adapter_slot, row.awaits_adapter = adapter.slot, False


def _adapter_of(waiting: SequenceState | Job) -> tuple[str, str]:
    """The digest and the place of the adapter that a row or a load waits for."""
    request: TokenRequest | AdapterLoad = waiting.request
    if isinstance(request, AdapterLoad):
        return request.digest, request.place
    return request.adapter, request.adapter_place
