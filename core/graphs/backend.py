"""What records a step and plays it again: graphs of a GPU, and the call itself on a CPU.

Owns all that differs between devices. Knows nothing of buckets, budgets or what a step computes.
Tensors that a step reads must lie at the same place when it is replayed, and what it returns lies
at one place for good: the next replay overwrites it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]
Call = Callable[[], Tensors]
"""A step over static buffers."""

_CAPTURING = threading.Lock()  # they share a stream
_NUM_WARM_UPS = 2  # libraries choose kernels and open handles on the first, allocate on the second


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that can be replayed. `num_bytes` is what holding it takes beside its inputs."""

    replay: Call
    num_bytes: int


class GraphBackend(Protocol):
    """Makes replays of steps. Used from one thread at a time."""

    def capture(self, run: Call) -> Captured:
        """Record `run`, which may be run for it, any number of times."""
        ...


class NativeCalls:
    """A CPU has nothing to record: a step is one native call already, and is made again."""

    def capture(self, run: Call) -> Captured:
        """The call itself, run once to learn what it returns."""
        return Captured(run, sum(tensor.nbytes for tensor in run()))


class DeviceGraphs:
    """Graphs of CUDA or HIP, all in one pool of memory: no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Call) -> Captured:
        """Warm up beside the current stream, then record."""
        current = torch.cuda.current_stream(self._device)
        # A capture that fails may leave its own stream as the current one.
        with _CAPTURING, torch.cuda.stream(current):
            self._warm_up(run, current)
            return self._record(run)

    def _warm_up(self, run: Call, current: torch.cuda.Stream) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_NUM_WARM_UPS):
                run()
        current.wait_stream(side)

    def _record(self, run: Call) -> Captured:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile: they wait for results and load models.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(self._device)  # entering gave unused memory back
            outputs = run()
        num_bytes = torch.cuda.memory_reserved(self._device) - before

        def replay() -> Tensors:
            graph.replay()
            return outputs

        return Captured(replay, max(num_bytes, 0))


def open_backend(device: torch.device) -> GraphBackend:
    """The one for a device."""
    return DeviceGraphs(device) if device.type == "cuda" else NativeCalls()
