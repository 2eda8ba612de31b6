"""The order in which the backend of a GPU calls torch, on a torch.cuda that takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triptych.core.runtime.graphs.backend import DeviceGraphs, NativeCalls, Tensors, open_backend
from triptych.core.runtime.graphs.captured import CapturedSteps

GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.log.append("replay")

    def reset(self) -> None:
        self.cuda.log.append("reset")


class FakeCuda:
    """What the backend uses of torch.cuda. A capture takes `num_bytes` of the pool."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.log: list[str] = []
        self.num_bytes = num_bytes
        self.pools: list[object] = []
        self.current = "main"

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, self.current)

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 - torch's name
        return FakeStream(self, "side")

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        return FakeGraph(self)

    def memory_snapshot(self, pool: object) -> list[dict[str, int]]:
        return [{"total_size": self.num_bytes} for each in self.pools if each is pool]

    def empty_cache(self) -> None:
        self.log.append("empty")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        self.log.append(f"on {stream.name}")
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        self.log.append("capture")
        self.current = "capture"
        try:
            yield
        except BaseException:
            raise RuntimeError("the capture failed, and so did its end")  # noqa: B904
        self.current = "main"
        self.log.append("captured")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(num_bytes=64)
    for name in dir(fake):
        if not name.startswith("_") and hasattr(torch.cuda, name):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_a_step_is_warmed_up_beside_then_recorded_and_not_run_again(cuda: FakeCuda) -> None:
    output = torch.zeros(1)

    def run() -> Tensors:
        cuda.log.append("run")
        return [output]

    captured = DeviceGraphs(GPU).capture(run)
    assert cuda.log == [
        "on main",
        "side waits for main",
        "on side",
        "run",
        "run",
        "main waits for side",
        "capture",
        "run",
        "captured",
    ]
    cuda.log.clear()
    assert captured.replay()[0] is output
    assert cuda.log == ["replay"]


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
    assert cuda.log == ["reset", "reset", "empty"]
    assert graphs.held_bytes == 0
    graphs.capture(list)
    assert len(set(map(id, cuda.pools))) == 2


def test_a_capture_that_fails_leaves_the_stream_as_it_was(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: Tensors) -> Tensors:
        if "capture" in cuda.log:
            raise torch.OutOfMemoryError("no")
        return []

    steps = CapturedSteps("m", GPU, budget_bytes=200, backend=DeviceGraphs(GPU))
    assert steps.run("k", run, []) is None
    assert cuda.current == "main"
    assert "no memory is left" in caplog.text
    assert steps.run("other", lambda _: [], []) == (), "which is tried all the same"


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
