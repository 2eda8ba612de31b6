"""Failures of steps, and when they mean a broken device.

Owns the translation of a step's exception into the error of its jobs, the verdict that the engine
must be restarted, and simulated failures. Knows nothing of the restart.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from triptych.core.engine_api.plan import PendingStep, Plan, Runner
from triptych.core.errors import (
    DeviceError,
    EngineDown,
    InternalError,
    JobFailed,
    OutOfMemory,
    RankLost,
    TriptychError,
)

MAX_FAILED_STEPS_IN_A_ROW = 3
MAX_NON_FINITE_JOBS = 3
NON_FINITE_WINDOW_S = 60.0

_STICKY = (
    *("CUDA error", "HIP error", "device-side assert"),
    *("illegal memory access", "misaligned address", "unspecified launch failure"),
)
"""After these errors every call to the device fails until the process ends. Triton words them
otherwise than torch."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "alloc failed")
"""In lower case. CUDA also reports some of these as errors, and continues."""

_log = logging.getLogger(__name__)


class EngineCrashed(RuntimeError):
    """The engine cannot continue in this process; the message is safe to show."""


def crash(error: RankLost) -> NoReturn:
    """On the loop's thread: end the engine, which has lost one of its ranks."""
    raise EngineCrashed(error.message)


class FailureCounter:
    """Counts failures; `verdict` returns why they are too many."""

    def __init__(self) -> None:
        self._num_failed_in_a_row = 0
        self._non_finite_s: deque[float] = deque(maxlen=MAX_NON_FINITE_JOBS)
        self._sticky = ""

    def note_success(self) -> None:
        """Record a step that succeeded."""
        self._num_failed_in_a_row = 0

    def note_non_finite(self, now_s: float) -> None:
        """Record a job that met NaN or infinity."""
        self._non_finite_s.append(now_s)

    def note_failure(self, error: Exception, what: str) -> TriptychError:
        """Log and count a step that raised; returns the error for its jobs."""
        reported = translate(error)
        expected = isinstance(error, JobFailed)
        _log.error(
            "step failed: %s: %s", what, reported.message, exc_info=None if expected else error
        )
        if isinstance(reported, OutOfMemory):
            return reported
        if isinstance(error, DeviceError) or any(mark in str(error) for mark in _STICKY):
            self._sticky = "the device failed"
        self._num_failed_in_a_row += 1
        return reported

    def verdict(self, now_s: float) -> str:
        """Why the engine must be restarted; empty while it works."""
        if self._sticky:
            return self._sticky
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            return f"{self._num_failed_in_a_row} steps in a row failed"
        times = self._non_finite_s
        if len(times) == MAX_NON_FINITE_JOBS and now_s - times[0] <= NON_FINITE_WINDOW_S:
            return f"{len(times)} jobs met NaN or infinity within a minute"
        return ""


def translate(error: Exception) -> TriptychError:
    """The error for the jobs of a step that raised `error`."""
    if isinstance(error, JobFailed):
        return error
    if isinstance(error, RankLost):
        return EngineDown("A device of the model was lost; the engine restarts.", retry_after_s=5.0)
    # torch's out-of-memory errors are recognized by text: schedulers do not import torch.
    if isinstance(error, MemoryError) or any(mark in str(error).lower() for mark in _NO_MEMORY):
        return OutOfMemory("A step did not fit in memory.")
    return InternalError("An internal error ended this job; the server's log says more.")


@dataclass(frozen=True, slots=True)
class FaultInjector:
    """A runner that fails after its work is launched, for `sim_failure`."""

    runner: Runner

    def launch(self, plan: Plan) -> PendingStep:
        """Launch the step, and raise the simulated error."""
        self.runner.launch(plan)
        raise RuntimeError("simulated failure")

    def close(self) -> None:
        """Do nothing: the model closes the wrapped runner."""
