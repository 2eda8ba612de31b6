"""Records a step and replays it: a graph on a GPU, the call itself on a CPU.

Owns all that differs between devices. Knows nothing of buckets, budgets or the computation of a
step. Tensors that a step reads must stay in place until it is replayed, and its outputs stay in one
place: the next replay overwrites them.
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
    """A recorded step that can be replayed until it is released."""

    replay: Call
    release: Callable[[], None]


class GraphBackend(Protocol):
    """Records steps. Used from one thread at a time."""

    @property
    def held_bytes(self) -> int:
        """The measured memory of the captured steps, without their inputs."""
        ...

    def capture(self, run: Call) -> Captured:
        """Record `run`, which the backend may call any number of times."""
        ...

    def another(self) -> GraphBackend:
        """A backend for the same device that shares no memory with this one."""
        ...


class NativeCalls:
    """The backend of a CPU, which records nothing: a step is one native call, called again."""

    def __init__(self) -> None:
        self._held: dict[object, int] = {}

    @property
    def held_bytes(self) -> int:
        """The bytes that the calls return."""
        return sum(self._held.values())

    def capture(self, run: Call) -> Captured:
        """Run the call once to measure its outputs, and return it."""
        key = object()
        self._held[key] = sum(tensor.nbytes for tensor in run())
        return Captured(run, lambda: self._held.__delitem__(key))

    def another(self) -> GraphBackend:
        """Create an equal backend."""
        return NativeCalls()


class DeviceGraphs:
    """Graphs of CUDA or HIP, all in one memory pool: no two of them run at the same time.

    Memory of a released graph is used by those captured after it, and goes back to the device with
    the last of them.
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
        """Create a backend with its own pool."""
        return DeviceGraphs(self._device)

    def capture(self, run: Call) -> Captured:
        """Warm up on another stream, then record."""
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
        # Other threads continue during a capture: they wait for results and load models.
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
    """Open the backend of a device."""
    return DeviceGraphs(device) if device.type == "cuda" else NativeCalls()
