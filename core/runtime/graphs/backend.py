"""Records a step and replays it: a graph on a GPU, the call itself on a CPU.

Owns all that differs between devices. Knows nothing of buckets, budgets or the computation of a
step. Tensors that a step reads must stay in place until it is replayed, and its outputs stay in one
place: the next replay overwrites them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.core.runtime.graphs.trial import Trial

Tensors = Sequence[torch.Tensor]
Call = Callable[[], Tensors]
"""A step over static buffers."""

_CAPTURING = threading.Lock()  # the streams below are shared
_NUM_WARM_UPS = 2  # libraries choose kernels and open handles on the first, allocate on the second
_STREAMS: dict[tuple[int | None, int], torch.cuda.Stream] = {}
"""By device and priority, the streams that steps are captured on. Kernels of a graph keep the
priority of the stream they were captured on, whatever stream it is replayed on. There are few,
because torch keeps a workspace of the matrix libraries (32 MiB on Hopper) and freed memory for each
stream."""
_INVALID_GRAPHS: list[torch.cuda.CUDAGraph] = []
"""Graphs of captures that failed to end: torch's allocators refer to them for ever."""


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

    def trial(self) -> Trial | None:
        """A measurement of whether a step gains from being captured; `None` if every step does."""
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

    def trial(self) -> Trial | None:
        """No measurement: there is nothing to gain or to lose."""
        return None

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
        self._workspace_bytes = 0
        self._driver_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The segments of the pool, the libraries' workspaces, and the driver's own memory.

        The driver's is that of the executable graphs and of the kernels that were loaded for them.
        """
        outside = self._workspace_bytes + self._driver_bytes
        if not self._num_graphs:
            return outside
        segments = torch.cuda.memory_snapshot(self._pool)
        return outside + sum(int(segment["total_size"]) for segment in segments)

    def trial(self) -> Trial | None:
        """Times runs of a step: a capture takes as long as some of them, and gains launches."""
        return Trial()

    def another(self) -> GraphBackend:
        """Create a backend with its own pool, and return memory that the warm-ups have freed."""
        torch.cuda.empty_cache()
        return DeviceGraphs(self._device)

    def capture(self, run: Call) -> Captured:
        """Warm up on a stream for captures, then record on it. Does not wait for the device."""
        current = torch.cuda.current_stream(self._device)
        # A capture that fails may leave its own stream as the current one.
        with _CAPTURING, torch.cuda.stream(current):
            side = _capture_stream(self._device, current.priority)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                graph, outputs, num_driver_bytes = self._measured(run, side)
            current.wait_stream(side)
        self._num_graphs += 1
        self._driver_bytes += num_driver_bytes
        return self._captured(graph, outputs, num_driver_bytes)

    def _captured(
        self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor], num_driver_bytes: int
    ) -> Captured:
        end = torch.cuda.Event(blocking=True)

        def replay() -> Tensors:
            graph.replay()
            end.record()
            return tuple(outputs)

        def release() -> None:
            end.synchronize()  # the driver may free what the last replay still uses
            graph.reset()
            outputs.clear()
            self._num_graphs -= 1
            self._driver_bytes -= num_driver_bytes
            if not self._num_graphs:
                torch.cuda.empty_cache()
                self._pool = torch.cuda.graph_pool_handle()

        return Captured(replay, release)

    def _measured(
        self, run: Call, side: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], int]:
        """The graph, its outputs, and the bytes that the driver took for it."""
        before, workspace_bytes = self._untracked_bytes(), _kept_bytes(side)
        for _ in range(_NUM_WARM_UPS):
            run()
        self._workspace_bytes += max(0, _kept_bytes(side) - workspace_bytes)
        try:
            graph, outputs = self._record(run)
        except torch.OutOfMemoryError:
            # Torch does not return freed memory to the device while it captures.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            graph, outputs = self._record(run)
        return graph, outputs, max(0, self._untracked_bytes() - before)

    def _untracked_bytes(self) -> int:
        """The device's memory in use that torch's allocator has not taken."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
        return int(all_bytes - free_bytes - torch.cuda.memory_reserved(self._device))

    def _record(self, run: Call) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        graph = torch.cuda.CUDAGraph()
        try:
            with self._recording(graph):
                outputs = list(run())
        except BaseException:
            if not self._num_graphs:  # the pool that this graph began cannot be used again
                self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph, outputs

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As `torch.cuda.graph`, without waiting for the device and emptying its caches.

        After a capture that does not end, torch's allocator goes on as if it were under way, and
        never again frees memory that other streams have used; it is stopped here.
        """
        # Other threads continue during a capture: they wait for results and load models.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            try:
                graph.capture_end()
            except RuntimeError:
                with suppress(RuntimeError):  # unless the allocator was stopped before the error
                    torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
                    _INVALID_GRAPHS.append(graph)
                raise


def _capture_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    key = device.index, priority
    if key not in _STREAMS:
        _STREAMS[key] = torch.cuda.Stream(device, priority=priority)
    return _STREAMS[key]


def _kept_bytes(stream: torch.cuda.Stream) -> int:
    """Memory outside of graphs that was allocated on a stream and is in use."""
    return sum(
        int(segment["allocated_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == stream.cuda_stream and segment["segment_pool_id"] == (0, 0)
    )


def open_backend(device: torch.device) -> GraphBackend:
    """Open the backend of a device."""
    return DeviceGraphs(device) if device.type == "cuda" else NativeCalls()
