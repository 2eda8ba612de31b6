"""Where a stage of the first light runs, and the records that it yields.

A stage is a module with `run(place) -> Iterator[Record]`. It yields a record as soon as it has one,
so that a stage stopped at its limit leaves the others behind.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
"""`name`, `figures` (a flat table of numbers, strings and booleans), `error` (a text or None)."""

_ERROR_CHARACTERS = 1500
_FLUSHED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Place:
    """The device of a stage, and its limits.

    `is_tiny`: small shapes, for a rehearsal. `scratch`: an empty folder of this stage alone.
    `deadline_s`: when the stage is stopped, by `time.monotonic`.
    """

    device: torch.device
    is_tiny: bool
    scratch: Path
    deadline_s: float

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the stage is stopped."""
        return self.deadline_s - time.monotonic()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Return to the device the memory that torch holds without using it."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def wall_s(self, work: Callable[[], object], num_repeats: int = 3) -> float:
        """Median seconds of a call on the host's clock, the device's work included.

        A first call, which is not counted, warms up. A rehearsal calls once more, no oftener.
        """
        num_repeats = 1 if self.is_tiny else num_repeats
        turns = []
        for _ in range(num_repeats + 1):
            self.wait()
            started_s = time.perf_counter()
            work()
            self.wait()
            turns.append(time.perf_counter() - started_s)
        return statistics.median(turns[1:])

    def device_s(self, work: Callable[[], object], num_repeats: int = 20) -> float:
        """Median seconds of the device's work of a call, between events, with a cold L2 cache.

        On a CPU these are seconds of the host's clock.
        """
        if not self.is_gpu:
            return self.wall_s(work, min(num_repeats, 3))
        for _ in range(3):
            work()
        flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device=self.device)
        pairs = []
        for _ in range(num_repeats):
            flushed.zero_()
            pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            pairs[-1][0].record()
            work()
            pairs[-1][1].record()
        self.wait()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def record(name: str, error: str | None = None, **figures: Any) -> Record:
    """One result of a stage."""
    return {"name": name, "figures": figures, "error": error}


def attempt(name: str, work: Callable[[], dict[str, Any]]) -> Record:
    """The figures of a piece of work under a name, or the error that ended it."""
    try:
        return record(name, **work())
    except Exception as error:  # one piece that fails must not end the others
        return record(name, error_text(error))


def error_text(error: BaseException) -> str:
    """An exception with the end of its traceback, short enough for a line of results."""
    text = "".join(traceback.format_exception(error)).strip()
    return text[-_ERROR_CHARACTERS:]
