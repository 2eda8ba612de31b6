"""How long a step kept its device busy.

Owns the pair of events around a step's work. Knows nothing of what is launched between them.
"""

from __future__ import annotations

import time

import torch


class DeviceClock:
    """Time from launch to the end of the work, on the device that does it."""

    __slots__ = ("_end", "_ended_s", "_start", "_started_s")

    def __init__(self, device: torch.device) -> None:
        self._start = self._end = None
        if device.type == "cuda":
            self._start = torch.Event(device, enable_timing=True)
            self._end = torch.Event(device, enable_timing=True)
            self._start.record()
        self._started_s = self._ended_s = time.perf_counter()

    def stop(self) -> None:
        """The last of the step's work has been launched."""
        self._ended_s = time.perf_counter()
        if self._end is not None:
            self._end.record()

    def elapsed_s(self) -> float:
        """Waits for the step."""
        if self._start is None or self._end is None:
            return self._ended_s - self._started_s
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3
