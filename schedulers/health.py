"""When failures stop being a job's bad luck and mean a broken device.

Owns the translation of what a step raised into the error its jobs get, and the verdict that the
engine must be restarted. Knows nothing of the restart.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NoReturn

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
"""After these every call to the device fails, until the process ends. Triton's errors do not begin
as those of torch do."""
_NO_MEMORY = ("out of memory", "can't allocate memory", "alloc_failed", "alloc failed")
"""In any case; CUDA calls some of these errors, too, and goes on."""

_log = logging.getLogger(__name__)


class EngineCrashed(RuntimeError):
    """The engine cannot go on in this process; its message is safe to show."""


def crash(error: RankLost) -> NoReturn:
    """On the loop's thread: end the engine, which has lost a part of itself."""
    raise EngineCrashed(error.message)


class FailureCounter:
    """Counts failures; `verdict` says when they are too many."""

    def __init__(self) -> None:
        self._num_failed_in_a_row = 0
        self._non_finite_s: deque[float] = deque(maxlen=MAX_NON_FINITE_JOBS)
        self._sticky = ""

    def note_success(self) -> None:
        """A step went through."""
        self._num_failed_in_a_row = 0

    def note_non_finite(self, now_s: float) -> None:
        """A job met NaN or infinity."""
        self._non_finite_s.append(now_s)

    def note_failure(self, error: Exception, what: str) -> TriptychError:
        """A step raised: log it, count it, and return the error for its jobs."""
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
        """Why the engine must be restarted; empty while it is well."""
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
    # torch's own out-of-memory errors, known by their text: schedulers do not import torch.
    if isinstance(error, MemoryError) or any(mark in str(error).lower() for mark in _NO_MEMORY):
        return OutOfMemory("A step did not fit in memory.")
    return InternalError("An internal error ended this job; the server's log says more.")
