"""When a step is found to gain from a capture, on events of a device and a clock that are set."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch

from triptych.core.runtime.graphs.backend import Tensors
from triptych.core.runtime.graphs.trial import Trial


@dataclass
class FakeDevice:
    """Launches of a step take `launch_ms`, its kernels `step_ms`, and it is over if `is_done`."""

    launch_ms: float
    step_ms: float = 10.0
    is_done: bool = True
    now_s: float = 0.0
    num_records: int = 0

    def launch(self) -> Tensors:
        self.now_s += self.launch_ms / 1000
        return []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice(launch_ms=1.0)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            device.num_records += 1

        def query(self) -> bool:
            return device.is_done

        def elapsed_time(self, end: object) -> float:
            return device.step_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter", lambda: device.now_s)
    return device


@pytest.mark.parametrize(("launch_ms", "gains"), [(1.0, False), (4.9, False), (9.0, True)])
def test_the_second_run_decides(device: FakeDevice, launch_ms: float, gains: bool) -> None:
    trial = Trial()
    device.launch_ms = 1000.0  # kernels are compiled
    trial.run(device.launch)
    assert trial.gains() is None
    device.launch_ms = launch_ms
    trial.run(device.launch)
    assert trial.gains() is gains


def test_a_run_under_way_is_neither_waited_for_nor_timed_again(device: FakeDevice) -> None:
    trial = Trial()
    device.is_done = False
    for _ in range(4):
        trial.run(device.launch)
        assert trial.gains() is None
    assert device.num_records == 4
    assert device.now_s == pytest.approx(4 * 0.001)
    device.is_done = True
    assert trial.gains() is False


def test_a_run_that_fails_is_not_timed(device: FakeDevice) -> None:
    def fail() -> Tensors:
        raise torch.OutOfMemoryError

    trial = Trial()
    trial.run(device.launch)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            trial.run(fail)
        assert trial.gains() is None
    trial.run(device.launch)
    assert trial.gains() is False
