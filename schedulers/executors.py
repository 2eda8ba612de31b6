"""The helper threads of the engine's loop, and the inbox through which other threads reach it.

Owns the order: steps are launched in plan order on the device thread, and their results are
collected in the same order on another thread, so a launch never waits for the result of the step
before. On a GPU launches run ahead; on a CPU a launch is the work itself. Models are loaded on
threads that end with the load. Knows nothing of models, schedulers or why a step runs.
"""

from __future__ import annotations

import math
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from triptych.core.engine_api.plan import PendingStep, Plan, Runner, StepResult
from triptych.core.engine_api.reports import StepRecord

Clock = Callable[[], float]
Post = Callable[[Callable[[], None]], None]
"""Schedules a call on the loop's thread, from any thread."""
AnyError = TypeVar("AnyError", bound=Exception)


class Executor:
    """Makes calls one after another on a thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a device that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make `call`, which must not raise, after the calls put before."""
        self._calls.put(call)

    def close(self, timeout_s: float | None = None) -> None:
        """Finish the calls that were put, and join the thread, up to `timeout_s`."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread must not keep the objects of its last call alive


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How and when a step ended; it occupied the device for the last `busy_s`."""

    result: StepResult | None
    error: Exception | None
    busy_s: float
    ended_s: float

    def record(self, plan: Plan) -> StepRecord:
        """Describe the step of `plan` for the log of steps."""
        return StepRecord(
            model=plan.model,
            kind=plan.kind,
            num_rows=len(self.result.rows) if self.result is not None else 0,
            start_s=self.ended_s - self.busy_s,
            length_s=self.busy_s,
            busy_s=self.busy_s,
            is_failed=self.result is None,
        )


class Executors(Protocol):
    """Where calls, steps and loads run. Tests run everything in place, in virtual time."""

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a call on the loop's thread, from any thread."""
        ...

    def take(self, wait_s: float) -> None:
        """On the loop's thread: make the posted calls; wait up to `wait_s` for the first."""
        ...

    def launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        """Run `plan`; `done` is posted with the outcome, in the order of the launches."""
        ...

    def run(self, call: Callable[[], None]) -> None:
        """Make a call on the device thread, between steps; it must not raise."""
        ...

    def load(self, call: Callable[[], None]) -> None:
        """Make a long call on another thread, after earlier ones; it must not raise."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish begun work, waiting up to `timeout_s` per thread."""
        ...


class ThreadExecutors:
    """The loop's inbox, and the threads of the device, of results and of loads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._device = Executor("triptych-device")
        self._collector = Executor("triptych-results")
        self._loads = Executor("triptych-loads")
        self._last_finished_s = -math.inf

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a call on the loop's thread, from any thread."""
        self._inbox.put(call)

    def take(self, wait_s: float) -> None:
        """On the loop's thread: make the posted calls; wait up to `wait_s` for the first."""
        try:
            if wait_s > 0:
                self._inbox.get(timeout=wait_s if math.isfinite(wait_s) else None)()
            # Only calls posted so far, so that a flood of calls cannot hold up the loop.
            for _ in range(self._inbox.qsize()):
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        """Run `plan`; `done` is posted with the outcome, in the order of the launches."""
        self._device.put(partial(self._launch, runner, plan, done))

    def run(self, call: Callable[[], None]) -> None:
        """Make a call on the device thread, between steps; it must not raise."""
        self._device.put(call)

    def load(self, call: Callable[[], None]) -> None:
        """Make a long call on a new thread, after earlier ones; it must not raise."""
        self._loads.put(partial(_run_on_new_thread, call))

    def close(self, timeout_s: float) -> None:
        """Finish begun work, waiting up to `timeout_s` per thread."""
        self._loads.close(timeout_s)
        self._device.close(timeout_s)
        self._collector.close(timeout_s)

    def _launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        started_s = self._clock()
        pending: PendingStep | Exception
        try:
            pending = runner.launch(plan)
        except Exception as error:  # the loop handles a failed step
            pending = without_locals(error)
        self._collector.put(partial(self._collect, pending, started_s, done))

    def _collect(
        self,
        pending: PendingStep | Exception,
        started_s: float,
        done: Callable[[StepOutcome], None],
    ) -> None:
        result, error = wait_for(pending)
        finished_s = self._clock()
        busy_s = max(0.0, finished_s - max(started_s, self._last_finished_s))
        self._last_finished_s = finished_s
        if result is not None:
            result = replace(result, elapsed_s=busy_s, ended_s=finished_s)
        outcome = StepOutcome(result=result, error=error, busy_s=busy_s, ended_s=finished_s)
        self.post(partial(done, outcome))


def _run_on_new_thread(call: Callable[[], None]) -> None:
    """Make a call on a new thread, and wait for its end.

    OpenMP keeps a thread's workers until that thread ends. While there are more of them than cores,
    no worker spins between loops, and the device thread's short loops take nearly twice as long.
    """
    thread = threading.Thread(target=call, name="triptych-loader", daemon=True)
    thread.start()
    thread.join()


def wait_for(pending: PendingStep | Exception) -> tuple[StepResult | None, Exception | None]:
    """The result of a launched step, or the error it raised."""
    if isinstance(pending, Exception):
        return None, pending
    try:
        return pending.result(), None
    except Exception as error:  # the loop handles a failed step
        return None, without_locals(error)


def without_locals(error: AnyError) -> AnyError:
    """Clear the frames of the error's traceback, so that it keeps no allocations alive."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error
