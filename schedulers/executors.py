"""The threads beside the loop, and the inbox through which they and other code reach it.

Owns the order: steps are launched in plan order on the device thread, and their results are
collected in the same order on another, so a launch never waits for the result of the step
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

Clock = Callable[[], float]
AnyError = TypeVar("AnyError", bound=Exception)


class Executor:
    """A thread that makes calls one after another."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a device that hangs cannot keep the process from leaving.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make `call`, which must not raise, after those put before."""
        self._calls.put(call)

    def close(self, timeout_s: float | None = None) -> None:
        """Let the thread finish what was put, and wait for it up to `timeout_s`."""
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # a thread that waits must not keep alive what its last call was about


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """How a step ended, and when: it was the device's only work for the last `busy_s`."""

    result: StepResult | None
    error: Exception | None
    busy_s: float
    ended_s: float


class Executors(Protocol):
    """Where things run. The tests have one that runs everything in place, in virtual time."""

    def post(self, call: Callable[[], None]) -> None:
        """Make a call on the loop's thread, from any thread."""
        ...

    def take(self, wait_s: float) -> None:
        """On the loop's thread: make the calls posted, waiting so long for the first one."""
        ...

    def launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        """Run `plan`; `done` is posted with the outcome, in the order of the launches."""
        ...

    def run(self, call: Callable[[], None]) -> None:
        """Make a call on the device thread, between steps; it must not raise."""
        ...

    def load(self, call: Callable[[], None]) -> None:
        """Make a long call on another thread, after those put before; it must not raise."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish what was begun, for so long at most per thread."""
        ...


class ThreadExecutors:
    """The loop's inbox, the device thread, the thread that collects results, those that load."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._device = Executor("triptych-device")
        self._collector = Executor("triptych-results")
        self._loads = Executor("triptych-loads")
        self._last_finished_s = -math.inf

    def post(self, call: Callable[[], None]) -> None:
        """Make a call on the loop's thread, from any thread."""
        self._inbox.put(call)

    def take(self, wait_s: float) -> None:
        """On the loop's thread: make the calls posted, waiting so long for the first one."""
        try:
            if wait_s > 0:
                self._inbox.get(timeout=wait_s if math.isfinite(wait_s) else None)()
            # No more than there are now, so that a flood of calls cannot hold the loop.
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
        """Make a long call on a thread of its own, after those put before; it must not raise."""
        self._loads.put(partial(_alone, call))

    def close(self, timeout_s: float) -> None:
        """Finish what was begun, for so long at most per thread."""
        self._loads.close(timeout_s)
        self._device.close(timeout_s)
        self._collector.close(timeout_s)

    def _launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        started_s = self._clock()
        pending: PendingStep | Exception
        try:
            pending = runner.launch(plan)
        except Exception as error:  # the loop decides what a failed step means
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
            result = replace(result, elapsed_s=busy_s)
        outcome = StepOutcome(result=result, error=error, busy_s=busy_s, ended_s=finished_s)
        self.post(partial(done, outcome))


def _alone(call: Callable[[], None]) -> None:
    """Make a call on a thread that ends with it.

    OpenMP keeps the workers that a thread ever called for until that thread ends, and while there
    are more of them than cores, no worker waits for the next loop awake: then the device thread's
    short loops take nearly twice as long.
    """
    thread = threading.Thread(target=call, name="triptych-loader", daemon=True)
    thread.start()
    thread.join()


def wait_for(pending: PendingStep | Exception) -> tuple[StepResult | None, Exception | None]:
    """The result of a launched step, or what it raised."""
    if isinstance(pending, Exception):
        return None, pending
    try:
        return pending.result(), None
    except Exception as error:  # the loop decides what a failed step means
        return None, without_locals(error)


def without_locals(error: AnyError) -> AnyError:
    """`error`, whose traceback no longer keeps alive what the frames it passed had allocated."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    return error
