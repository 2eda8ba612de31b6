"""Copies, events and streams of a device: nothing waits, and nothing comes too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.core.runtime.devices.device import Device, end_of_work
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.sampling.host_copy import HostCopy

pytestmark = pytest.mark.gpu
SLEEP = 400_000_000
"""Clocks: a fifth of a second."""


def busy() -> torch.cuda.Event:
    """Work for a while, and the event at its end."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    event = torch.cuda.Event()
    event.record()
    return event


def test_a_real_gpu(cuda: torch.device) -> None:
    gpu = Device.open("gpu")
    gpu.synchronize()
    assert gpu.torch == cuda
    assert gpu.free_bytes() > 2**28
    assert gpu.compute_dtype(torch.float32) is torch.float32
    assert gpu.target.partition(":")[0] in {"cuda", "hip"}


def test_uploads_overtake_no_copy_and_wait_for_none(cuda: torch.device) -> None:
    uploads = Uploads(cuda)
    uploads.send([np.zeros(10, np.int64)])  # the allocator's own calls are over
    sleeping = busy()
    sent = [uploads.send([np.full(500, n), np.full(3, n / 2)]) for n in range(40)]
    assert not sleeping.query(), "the host waited"
    for n, (ints, floats) in enumerate(sent):
        assert ints.unique().tolist() == [n]
        assert floats.unique().tolist() == [n / 2]
        assert (ints.dtype, floats.dtype) == (torch.int64, torch.float64)


def test_memory_of_a_copy_is_not_given_away_before_it_was_read(cuda: torch.device) -> None:
    to_device(torch.zeros(1000), cuda)
    sleeping = busy()
    sent = [to_device(torch.full((1000,), float(n)), cuda) for n in range(40)]
    assert not sleeping.query(), "the host waited"
    assert [each.unique().tolist() for each in sent] == [[n] for n in range(40)]


def test_a_copy_to_the_host_is_of_its_time(cuda: torch.device) -> None:
    x = torch.ones(1000, device=cuda)
    x += 1  # a kernel's first launch loads it, and may wait
    x.zero_()
    HostCopy(x).get()
    sleeping, copies = busy(), []
    for _ in range(10):
        copies.append(HostCopy(x))
        x += 1
    assert not sleeping.query(), "the host waited"
    assert [copy.get().unique().tolist() for copy in copies] == [[n] for n in range(10)]


def test_a_step_begins_behind_what_loaded_its_model(cuda: torch.device) -> None:
    weights = torch.zeros(1000, device=cuda)
    busy()
    weights += 7
    streams = [StepStream(cuda, is_urgent=True), StepStream(cuda)]
    found = []
    for stream in streams:
        with stream.current():
            found.append(HostCopy(weights * 2))
    assert [copy.get().unique().tolist() for copy in found] == [[14.0]] * 2


def test_urgent_streams_go_first(cuda: torch.device) -> None:
    priorities = []
    for is_urgent in (True, False):
        with StepStream(cuda, is_urgent=is_urgent).current():
            priorities.append(torch.cuda.current_stream(cuda).priority)
    assert priorities[0] < priorities[1]


def test_the_end_of_work_is_that_of_its_stream(cuda: torch.device) -> None:
    first, second = StepStream(cuda), StepStream(cuda)
    torch.ones(1000, device=cuda).sum().item()  # a kernel's first launch loads it, and may wait
    with second.current():
        torch.cuda._sleep(SLEEP)
        other = torch.cuda.Event()
        other.record()
    with first.current():
        x = torch.ones(1000, device=cuda).sum()
        end = torch.cuda.Event()
        wait = end_of_work(cuda)
        end.record()
    wait()
    assert end.query()
    assert not other.query(), "it waited for the other stream"
    assert x.item() == 1000
    torch.cuda.synchronize()
