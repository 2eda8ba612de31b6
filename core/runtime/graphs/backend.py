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
    """A step that can be replayed, until it is released."""

    replay: Call
    release: Callable[[], None]


class GraphBackend(Protocol):
    """Makes replays of steps. Used from one thread at a time."""

    @property
    def held_bytes(self) -> int:
        """What the captured steps take beside their inputs, measured."""
        ...

    def capture(self, run: Call) -> Captured:
        """Record `run`, which may be run for it, any number of times."""
        ...

    def another(self) -> GraphBackend:
        """One for the same device, that shares no memory with this one."""
        ...


class NativeCalls:
    """A CPU has nothing to record: a step is one native call already, and is made again."""

    def __init__(self) -> None:
        self._held: dict[object, int] = {}

    @property
    def held_bytes(self) -> int:
        """What the calls return."""
        return sum(self._held.values())

    def capture(self, run: Call) -> Captured:
        """The call itself, run once to learn what it returns."""
        key = object()
        self._held[key] = sum(tensor.nbytes for tensor in run())
        return Captured(run, lambda: self._held.__delitem__(key))

    def another(self) -> GraphBackend:
        """Like any other."""
        return NativeCalls()


class DeviceGraphs:
    """Graphs of CUDA or HIP, all in one pool of memory: no two of them run at the same time.

    What a graph that is released has taken serves those captured after it, and goes back to the
    device with the last of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._num_graphs = 0

    @property
    def held_bytes(self) -> int:
        """The segments of the pool, as torch's allocator counts them."""
        if not self._num_graphs:
            return 0
        segments = torch.cuda.memory_snapshot(self._pool)
        return sum(int(segment["total_size"]) for segment in segments)

    def another(self) -> GraphBackend:
        """With a pool of its own."""
        return DeviceGraphs(self._device)

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
            outputs = list(run())
        self._num_graphs += 1

        def replay() -> Tensors:
            graph.replay()
            return tuple(outputs)

        def release() -> None:
            graph.reset()
            outputs.clear()
            self._num_graphs -= 1
            if not self._num_graphs:
                torch.cuda.empty_cache()
                self._pool = torch.cuda.graph_pool_handle()

        return Captured(replay, release)


def open_backend(device: torch.device) -> GraphBackend:
    """The one for a device."""
    return DeviceGraphs(device) if device.type == "cuda" else NativeCalls()
