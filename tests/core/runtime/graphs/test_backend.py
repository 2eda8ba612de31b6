"""The order in which the backend of a GPU calls torch, on a torch.cuda that takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triptych.core.runtime.graphs import backend as backend_module
from triptych.core.runtime.graphs.backend import DeviceGraphs, NativeCalls, Tensors, open_backend
from triptych.core.runtime.graphs.captured import CapturedSteps

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str, priority: int = 0) -> None:
        self.cuda, self.name, self.priority = cuda, name, priority
        self.cuda_stream = id(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pool = pool
        self.cuda.pools.append(pool)
        self.cuda.log.append(f"capture on {self.cuda.current.name}")

    def capture_end(self) -> None:
        if self.cuda.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.free_bytes -= self.cuda.num_driver_bytes
        self.cuda.log.append("captured")

    def replay(self) -> None:
        self.cuda.log.append("replay")

    def reset(self) -> None:
        self.cuda.log.append("reset")
        self.cuda.free_bytes += self.cuda.num_driver_bytes


class FakeEvent:
    def __init__(self, cuda: FakeCuda, *, blocking: bool) -> None:
        assert blocking
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.log.append("record")

    def synchronize(self) -> None:
        self.cuda.log.append("wait")


class FakeCuda:
    """What the backend uses of torch.cuda. A capture takes `num_bytes` of the pool.

    It also takes `num_driver_bytes` of the device, and its first warm-up `num_workspace_bytes` of
    the allocator, on the stream it runs on.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self.log: list[str] = []
        self.num_bytes = num_bytes
        self.num_driver_bytes = self.num_workspace_bytes = 0
        self.free_bytes, self.is_invalid = 1000, False
        self.pools: list[object] = []
        self.ended: list[object] = []
        self.current = FakeStream(self, "main", priority=-1)

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def Stream(self, device: torch.device, *, priority: int) -> FakeStream:  # noqa: N802 - torch's
        return FakeStream(self, f"side {priority}", priority)

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        return FakeGraph(self)

    def Event(self, *, blocking: bool) -> FakeEvent:  # noqa: N802 - torch's name
        return FakeEvent(self, blocking=blocking)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free_bytes, 1000

    def memory_reserved(self, device: torch.device) -> int:
        return 0

    def memory_snapshot(self, pool: object = None) -> list[dict[str, object]]:
        if pool is not None:
            return [{"total_size": self.num_bytes} for each in self.pools if each is pool]
        if not self.num_workspace_bytes or "run" not in self.log:
            return []
        stream, size = self.current.cuda_stream, self.num_workspace_bytes
        segments = [(stream, (0, 0)), (stream, (0, 1)), (1, (0, 0))]
        return [
            {"allocated_size": size, "stream": stream, "segment_pool_id": pool}
            for stream, pool in segments
        ]

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.log.append("empty")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append(f"on {stream.name}")
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(num_bytes=64)
    for name in dir(fake):
        if not name.startswith("_") and hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda index, pool: fake.ended.append(pool)
    )
    monkeypatch.setattr(backend_module, "_STREAMS", {})
    monkeypatch.setattr(backend_module, "_INVALID_GRAPHS", [])
    return fake


def test_a_step_is_warmed_up_apart_then_recorded_and_not_run_again(cuda: FakeCuda) -> None:
    output = torch.zeros(1)

    def run() -> Tensors:
        cuda.log.append("run")
        return [output]

    captured = DeviceGraphs(GPU).capture(run)
    assert cuda.log == [
        "on main",
        "side -1 waits for main",
        "on side -1",
        "run",
        "run",
        "capture on side -1",
        "run",
        "captured",
        "main waits for side -1",
    ]
    cuda.log.clear()
    assert captured.replay()[0] is output
    assert cuda.log == ["replay", "record"]


def test_steps_of_a_priority_are_captured_on_one_stream(cuda: FakeCuda) -> None:
    graphs = DeviceGraphs(GPU)
    for priority in (-1, 0, -1, 0):
        with cuda.stream(FakeStream(cuda, "main", priority)):
            graphs.capture(list)
    streams = [line for line in cuda.log if line.startswith("capture on")]
    assert streams == ["capture on side -1", "capture on side 0"] * 2
    assert len(backend_module._STREAMS) == 2


def test_memory_of_the_driver_and_of_libraries_is_counted(cuda: FakeCuda) -> None:
    cuda.num_driver_bytes, cuda.num_workspace_bytes = 10, 300

    def run() -> Tensors:
        cuda.log.append("run")
        return []

    graphs = DeviceGraphs(GPU)
    captured = [graphs.capture(run) for _ in range(2)]
    assert graphs.held_bytes == 2 * 64 + 2 * 10 + 300
    captured[0].release()
    assert graphs.held_bytes == 2 * 64 + 10 + 300
    captured[1].release()
    assert graphs.held_bytes == 300, "torch keeps the workspace"


def test_all_graphs_share_a_pool_whose_segments_are_counted(cuda: FakeCuda) -> None:
    graphs = DeviceGraphs(GPU)
    assert graphs.held_bytes == 0
    captured = [graphs.capture(list) for _ in range(3)]
    assert len(set(map(id, cuda.pools))) == 1
    assert graphs.held_bytes == 3 * 64
    another = graphs.another()
    another.capture(list)
    assert another.held_bytes == 64
    assert len(captured) == 3


def test_the_pool_goes_back_with_the_last_of_its_graphs(cuda: FakeCuda) -> None:
    graphs = DeviceGraphs(GPU)
    first, second = [graphs.capture(list) for _ in range(2)]
    cuda.log.clear()
    first.release()
    assert graphs.held_bytes == 2 * 64
    second.release()
    assert cuda.log == ["wait", "reset", "wait", "reset", "empty"]
    assert graphs.held_bytes == 0
    graphs.capture(list)
    assert len(set(map(id, cuda.pools))) == 2


def test_a_capture_that_fails_leaves_the_stream_as_it_was(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: Tensors) -> Tensors:
        if any(line.startswith("capture on") for line in cuda.log):
            raise torch.OutOfMemoryError("no")
        return []

    steps = CapturedSteps("m", GPU, budget_bytes=200, backend=DeviceGraphs(GPU), verifies=True)
    assert steps.run("k", run, []) is None
    assert cuda.current.name == "main"
    assert "no memory is left" in caplog.text
    assert len(set(map(id, cuda.pools))) == 2, "a pool without graphs cannot be used again"
    assert steps.run("other", lambda _: [], []) == (), "which is tried all the same"


def test_memory_freed_by_others_is_tried_before_a_step_is_given_up(cuda: FakeCuda) -> None:
    def run() -> Tensors:
        if cuda.log[-1].startswith("capture on") and "empty" not in cuda.log:
            raise torch.OutOfMemoryError("no")
        return []

    DeviceGraphs(GPU).capture(run)
    assert cuda.log[-5:-1] == ["synchronize", "empty", "capture on side -1", "captured"]


def test_after_an_invalid_capture_the_allocator_is_stopped(cuda: FakeCuda) -> None:
    cuda.is_invalid = True
    graphs = DeviceGraphs(GPU)
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.capture(list)
    assert cuda.current.name == "main"
    assert cuda.ended == cuda.pools
    (graph,) = backend_module._INVALID_GRAPHS
    assert graph.pool is cuda.pools[0]  # type: ignore[attr-defined]  # a `FakeGraph`


def test_a_cpu_makes_the_call_itself() -> None:
    calls: list[Any] = []

    def run() -> Tensors:
        calls.append(None)
        return [torch.zeros(3)]

    backend = open_backend(torch.device("cpu"))
    assert isinstance(backend, NativeCalls)
    captured = backend.capture(run)
    assert backend.held_bytes == 12
    captured.replay()
    assert len(calls) == 2
    captured.release()
    assert backend.held_bytes == 0


def test_the_backend_follows_the_device(cuda: FakeCuda) -> None:
    assert isinstance(open_backend(GPU), DeviceGraphs)
