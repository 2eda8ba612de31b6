"""The threads beside the loop keep their order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from support.engine_seams import eventually
from support.virtual import VirtualClock
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.schedulers.executors import StepOutcome, ThreadExecutors


@dataclass
class Gated:
    """A step whose result comes when its gate opens; advances the clock by what it took."""

    step_id: int
    gate: threading.Event
    clock: VirtualClock
    error: Exception | None = None

    def result(self) -> StepResult:
        assert self.gate.wait(timeout=30)
        self.clock.advance(1.0)
        if self.error is not None:
            raise self.error
        return StepResult(rows=(self.step_id,))


class GatedRunner:
    """Launches at once; step 2 fails to launch, step 3 fails later."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.gates = [threading.Event() for _ in range(5)]
        self.launched: list[int] = []

    def launch(self, plan: Plan) -> Gated:
        self.launched.append(plan.step_id)
        if plan.step_id == 2:
            raise ValueError("cannot launch")
        error = ValueError("cannot finish") if plan.step_id == 3 else None
        return Gated(plan.step_id, self.gates[plan.step_id], self.clock, error)

    def close(self) -> None: ...


@pytest.fixture
def executors() -> Iterator[tuple[ThreadExecutors, VirtualClock]]:
    clock = VirtualClock()
    executors = ThreadExecutors(clock)
    yield executors, clock
    executors.close(30.0)


def take_until(executors: ThreadExecutors, condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        executors.take(0.1)
    raise AssertionError("did not happen")


def test_launches_run_ahead_and_outcomes_come_in_order(
    executors: tuple[ThreadExecutors, VirtualClock],
) -> None:
    threads, clock = executors
    runner = GatedRunner(clock)
    outcomes: list[StepOutcome] = []
    for step_id in range(5):
        plan = Plan(step_id=step_id, model="m", kind="k")
        threads.launch(runner, plan, outcomes.append)
    eventually(lambda: runner.launched == [0, 1, 2, 3, 4])
    for gate in reversed(runner.gates):
        gate.set()
    take_until(threads, lambda: len(outcomes) == 5)
    assert [o.result.rows[0] if o.result else str(o.error) for o in outcomes] == [
        *(0, 1, "cannot launch", "cannot finish", 4)
    ]
    assert [outcome.busy_s for outcome in outcomes] == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert all(o.result.elapsed_s == o.busy_s for o in outcomes if o.result)


def test_what_a_failed_step_allocated_goes_with_it(
    executors: tuple[ThreadExecutors, VirtualClock],
) -> None:
    threads, _ = executors
    buffers: list[weakref.ref[object]] = []

    class Buffer:
        pass

    class Failing:
        def launch(self, plan: Plan) -> Gated:
            buffer = Buffer()
            buffers.append(weakref.ref(buffer))
            raise MemoryError

        def close(self) -> None: ...

    errors: list[bool] = []
    threads.launch(
        Failing(),
        Plan(step_id=0, model="m", kind="k"),
        lambda outcome: errors.append(outcome.error is not None),
    )
    take_until(threads, lambda: errors == [True])
    eventually(lambda: buffers[0]() is None)


def test_calls_between_steps_run_on_the_device_thread_and_posts_on_the_loops(
    executors: tuple[ThreadExecutors, VirtualClock],
) -> None:
    threads, _ = executors
    names: list[str] = []

    def note() -> None:
        names.append(threading.current_thread().name)

    def note_and_post() -> None:
        note()
        threads.post(note)

    threads.run(note_and_post)
    take_until(threads, lambda: len(names) == 2)
    threads.load(note_and_post)
    take_until(threads, lambda: len(names) == 4)
    here = threading.current_thread().name
    assert names == ["triptych-device", here, "triptych-loader", here]


def test_a_loading_thread_ends_with_its_load_and_loads_keep_their_order(
    executors: tuple[ThreadExecutors, VirtualClock],
) -> None:
    """Its OpenMP workers would stay for as long as it does, and slow down those of the device."""
    threads, _ = executors
    loaders: list[threading.Thread] = []
    gate = threading.Event()

    def load() -> None:
        assert gate.wait(timeout=30)
        assert not any(loader.is_alive() for loader in loaders)
        loaders.append(threading.current_thread())

    threads.load(load)
    threads.load(load)
    gate.set()
    eventually(lambda: len(loaders) == 2)
    eventually(lambda: not loaders[1].is_alive())


def test_take_respects_its_timeout(executors: tuple[ThreadExecutors, VirtualClock]) -> None:
    threads, _ = executors
    threads.take(0.0)
    threads.take(-1.0)
    threads.take(0.001)
    calls: list[int] = []
    for n in range(3):
        threads.post(lambda n=n: calls.append(n))  # type: ignore[misc]
    threads.take(float("inf"))
    assert calls == [0, 1, 2]


def test_a_call_posted_while_taking_waits_for_the_next_turn(
    executors: tuple[ThreadExecutors, VirtualClock],
) -> None:
    threads, _ = executors
    calls: list[int] = []

    def again() -> None:
        calls.append(len(calls))
        threads.post(again)

    threads.post(again)
    threads.take(0.0)
    assert calls == [0]
