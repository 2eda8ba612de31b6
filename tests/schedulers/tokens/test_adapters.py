"""Slots of adapters: who has one, who waits, who gives way."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from triptych.core.engine_api.job import Job, Output
from triptych.core.engine_api.tokens import AdapterDrop, AdapterLoad, TokenRequest
from triptych.core.errors import MemoryBudgetExceeded, TriptychError, WeightsError
from triptych.schedulers.tokens.adapters import AdapterPool
from triptych.schedulers.tokens.state import SequenceState


class Store:
    """Slots without memory; `errors` are raised by the next loads of a digest."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.held: dict[int, str] = {}
        self.errors: dict[str, TriptychError] = {}

    def load(self, place: str, digest: str, slot: int) -> None:
        assert slot not in self.held
        if error := self.errors.pop(digest, None):
            raise error
        self.held[slot] = digest

    def drop(self, slot: int) -> None:
        del self.held[slot]


class World:
    """A pool whose loads run when they are told to."""

    def __init__(self, num_slots: int = 2, policy: str = "lru") -> None:
        self.store = Store(num_slots)
        self.loads: deque[Callable[[], None]] = deque()
        self.failed: list[SequenceState] = []
        self.pool = AdapterPool(self.store, policy=policy, start=self.loads.append)
        self.pool.on_failed = self._fail
        self.num_rows = 0

    def _fail(self, row: SequenceState, error: TriptychError) -> None:
        self.failed.append(row)
        self.pool.leave(row)

    def row(self, digest: str) -> SequenceState:
        self.num_rows += 1
        request = TokenRequest(prompt_ids=(1,), adapter=digest, adapter_place=digest)
        name = f"row-{self.num_rows}"
        row = SequenceState(
            name=name,
            job=Job(job_id=name, model="m", request=request),
            request=request,
            rank=(0, self.num_rows),
            arrival_s=0.0,
            max_outputs=1,
            root=b"",
        )
        self.pool.join(row)
        return row

    def job(self, request: AdapterLoad | AdapterDrop) -> list[Output]:
        """Run a load or a drop; its outputs."""
        outputs: list[Output] = []
        job = Job(job_id="job", model="m", request=request, sink=outputs.append)
        if isinstance(request, AdapterLoad):
            self.pool.load(job)
        else:
            self.pool.drop(job)
        return outputs

    def settle(self) -> None:
        while self.loads:
            self.loads.popleft()()
            self.pool.check()


def test_rows_wait_until_their_adapter_is_there_and_share_it() -> None:
    world = World()
    first, second = world.row("a"), world.row("a")
    assert first.awaits_adapter
    assert second.awaits_adapter
    assert len(world.loads) == 1
    world.settle()
    assert first.adapter_slot == second.adapter_slot >= 0
    assert not world.row("a").awaits_adapter


def test_an_adapter_in_use_never_gives_way_and_the_waiting_go_first_in_order() -> None:
    world = World()
    users = [world.row(name) for name in "ab"]
    late, later = world.row("c"), world.row("d")
    world.settle()
    assert late.awaits_adapter
    assert sorted(world.store.held.values()) == ["a", "b"]
    world.pool.leave(users[1])
    world.settle()
    assert not late.awaits_adapter
    assert later.awaits_adapter
    assert sorted(world.store.held.values()) == ["a", "c"]


def test_rows_with_adapters_in_memory_overtake_a_bounded_number_of_times() -> None:
    world = World()
    users = [world.row(name) for name in "ab"]
    world.settle()
    world.row("c")
    rows = [world.row("a") for _ in range(20)]
    assert [row.awaits_adapter for row in rows] == [False] * 16 + [True] * 4
    for row in (*rows[:16], users[0]):
        world.pool.leave(row)
    world.settle()
    assert "c" in world.store.held.values()


def test_the_policy_chooses_which_idle_adapter_gives_way() -> None:
    for policy, left in (("lru", "a"), ("fifo", "b")):
        world = World(policy=policy)
        for name in ("a", "b", "a"):
            row = world.row(name)
            world.settle()
            world.pool.leave(row)
        world.row("c")
        world.settle()
        assert sorted(world.store.held.values()) == [left, "c"]


def test_a_failed_load_ends_its_rows_and_loads_alone() -> None:
    world = World()
    world.store.errors["a"] = WeightsError("damaged")
    row, other = world.row("a"), world.row("b")
    outputs = world.job(AdapterLoad(digest="a", place="a"))
    world.settle()
    assert world.failed == [row]
    assert outputs[0].error is not None
    assert outputs[0].error.code == WeightsError.code
    assert not other.awaits_adapter


def test_memory_is_found_by_dropping_idle_adapters() -> None:
    world = World(num_slots=3)
    idle, user = world.row("a"), world.row("b")
    world.settle()
    world.pool.leave(idle)
    world.store.errors["c"] = MemoryBudgetExceeded("short")
    row = world.row("c")
    world.settle()
    assert not row.awaits_adapter
    assert sorted(world.store.held.values()) == ["b", "c"]
    world.store.errors["d"] = MemoryBudgetExceeded("short")
    last = world.row("d")
    world.settle()
    assert world.failed == [last]
    assert not user.awaits_adapter


def test_a_drop_waits_for_rows_and_a_load_takes_it_back() -> None:
    world = World()
    row = world.row("a")
    world.settle()
    dropped = world.job(AdapterDrop(digest="a"))
    assert not dropped
    world.pool.leave(row)
    assert dropped[0].is_final
    assert not world.store.held
    assert world.job(AdapterDrop(digest="a"))[0].error is None
    row = world.row("a")
    world.settle()
    taken_back = world.job(AdapterDrop(digest="a"))
    assert world.job(AdapterLoad(digest="a", place="a"))
    assert taken_back[0].is_final
    world.pool.leave(row)
    assert list(world.store.held.values()) == ["a"]


def test_no_order_of_events_loses_a_slot_or_a_row() -> None:
    source = random.Random(3)
    world, rows, jobs = World(num_slots=3), list[SequenceState](), list[list[Output]]()
    for _ in range(600):
        event, name = source.random(), source.choice("abcdefg")
        if event < 0.35:
            rows.append(world.row(name))
        elif event < 0.65 and rows:
            world.pool.leave(rows.pop(source.randrange(len(rows))))
        elif event < 0.75:
            jobs.append(world.job(AdapterLoad(digest=name, place=name)))
        elif event < 0.82:
            jobs.append(world.job(AdapterDrop(digest=name)))
        elif event < 0.86:
            world.store.errors[name] = WeightsError("damaged")
        elif world.loads:
            world.loads.popleft()()
        world.pool.check()
    while rows:
        world.pool.leave(rows.pop())
        world.settle()
    world.settle()
    assert all(job[-1].is_final for job in jobs)
    for name in "abcdefg":
        world.job(AdapterDrop(digest=name))
    assert not world.store.held
    assert world.pool.gauges() == {"adapters": 0, "adapters_waiting": 0}
