"""Whether a step gains from being captured: how long its launches take, and how long it takes.

Owns the measurement. Knows no graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_NUM_RUNS = 2  # the first run compiles kernels and opens handles
_GAIN = 0.5
"""The least share of a step's time that its launches take where capturing it pays: the host then
has little time for other models. Shorter launches are hidden behind the kernels before them."""


class Trial:
    """Times eager runs of one step, on one stream, without waiting for them."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._num_runs = 0
        self._launch_s = 0.0

    def run(self, call: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Run the step, and time it unless an earlier run is still timed."""
        if self._num_runs == _NUM_RUNS:
            return call()
        self._start.record()
        before = time.perf_counter()
        outputs = call()
        self._launch_s = time.perf_counter() - before
        self._end.record()
        self._num_runs += 1  # only now: a run that fails is not timed
        return outputs

    def gains(self) -> bool | None:
        """Whether the step's launches take most of its time; `None` while that is not known."""
        if self._num_runs < _NUM_RUNS or not self._end.query():
            return None
        step_ms: float = self._start.elapsed_time(self._end)
        return 1000 * self._launch_s > _GAIN * step_ms
