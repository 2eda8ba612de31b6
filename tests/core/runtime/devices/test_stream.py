"""A model's stream comes behind what loaded it, on a torch.cuda that takes notes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from triptych.core.runtime.devices.stream import StepStream


class FakeStream:
    def __init__(self, device: torch.device, priority: int) -> None:
        self.device, self.priority = device, priority
        self.behind: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.behind.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    made: list[FakeStream] = []

    def make(device: torch.device, priority: int) -> FakeStream:
        made.append(FakeStream(device, priority))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    return made


def test_each_model_has_a_stream_behind_what_loaded_it(streams: list[FakeStream]) -> None:
    gpu = torch.device("cuda", 1)
    models = [StepStream(gpu, is_urgent=True), StepStream(gpu)]
    assert len(streams) == 2
    for model, stream in zip(models, streams, strict=True):
        assert stream.device == gpu
        assert stream.behind == [("current", gpu)]
        with model.current() as entered:
            assert entered is stream
    assert streams[0].priority < streams[1].priority


def test_a_cpu_has_none(streams: list[FakeStream]) -> None:
    with StepStream(torch.device("cpu"), is_urgent=True).current():
        assert not streams
