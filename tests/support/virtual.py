"""The engine's loop in virtual time, for tests and for benchmarks of policies.

Owns a clock that advances only when nothing is left to do at a moment, and executors that run
everything in place. A function gives the duration of a step, so hours of a server's life take
seconds and always come out the same.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from triptych.core.engine_api.plan import Plan, Runner
from triptych.schedulers.executors import StepOutcome, wait_for

_LONGEST_S = 1e5


class VirtualClock:
    """Time that passes only on command."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The moment it is."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


class VirtualExecutors:
    """Implements `schedulers.executors.Executors`: a step takes what `cost_s(plan)` says.

    Waiting moves the clock to the next thing that happens. `started` are the plans and the moments
    at which the device took them up.
    """

    def __init__(self, clock: VirtualClock, cost_s: Callable[[Plan], float]) -> None:
        self.clock = clock
        self.cost_s = cost_s
        self.started: list[tuple[float, Plan]] = []
        self._posted: deque[Callable[[], None]] = deque()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._free_s = -math.inf
        self._num_called = 0

    def post(self, call: Callable[[], None]) -> None:
        """Make a call on the loop's next turn."""
        self._posted.append(call)

    def call_at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Make a call when that moment has come."""
        self._num_called += 1
        heapq.heappush(self._coming, (moment_s, self._num_called, call))

    def take(self, wait_s: float) -> None:
        """Make the calls posted; where there are none, go to the next moment something happens."""
        assert self.clock.now_s < _LONGEST_S, "what is waited for never comes"
        self._arrive()
        if not self._posted and wait_s > 0:
            next_s = self._coming[0][0] if self._coming else math.inf
            assert min(self.clock.now_s + wait_s, next_s) < math.inf, "would wait for ever"
            self.clock.now_s = min(self.clock.now_s + wait_s, next_s)
            self._arrive()
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def launch(self, runner: Runner, plan: Plan, done: Callable[[StepOutcome], None]) -> None:
        """Run `plan` now; `done` is called when the device would be through with it."""
        try:
            pending = runner.launch(plan)
        except Exception as error:  # the loop decides what a failed step means
            result, failure = wait_for(error)
        else:
            result, failure = wait_for(pending)
        start_s = max(self.clock.now_s, self._free_s)
        cost_s = self.cost_s(plan)
        self._free_s = start_s + cost_s
        self.started.append((start_s, plan))
        if result is not None:
            result = replace(result, elapsed_s=cost_s)
        outcome = StepOutcome(result=result, error=failure, busy_s=cost_s, ended_s=self._free_s)
        self.call_at(self._free_s, lambda: done(outcome))

    def run(self, call: Callable[[], None]) -> None:
        """Make a call now."""
        call()

    def load(self, call: Callable[[], None]) -> None:
        """Make a call now: loading takes no time."""
        call()

    def close(self, timeout_s: float) -> None:
        """Nothing to release."""

    def _arrive(self) -> None:
        """Post what has come due."""
        while self._coming and self._coming[0][0] <= self.clock.now_s:
            self._posted.append(heapq.heappop(self._coming)[2])
