"""The GPU that is not there shows each fault that it is there to show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from support.fake_cuda import CUDA, FakeCuda
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.transfer import to_device
from triptych.core.runtime.sampling.host_copy import HostCopy

FAULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "an array sent from pageable memory": lambda x: torch.from_numpy(np.zeros(3)).to(CUDA),
    "the same, asynchronously": lambda x: torch.from_numpy(np.zeros(3)).to(CUDA, non_blocking=True),
    "a tensor made of a list": lambda x: torch.tensor([1, 2], device=CUDA),
    "a tensor made like another": lambda x: x.new_tensor([1.0]),
    "an index that is a list": lambda x: x[[0, 1]],
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "a number put at an index": lambda x: x.__setitem__(x[0].long(), 1.0),
    "a number put in place of one": lambda x: x[0].__setitem__(0, 1.0),
    "a row of the host": lambda x: x.__setitem__(0, torch.zeros(3)),
    "a copy to the host": lambda x: x.cpu(),
    "a copy that is read at once": lambda x: HostCopy(x).get(),
    "an event": lambda x: end_of_work(CUDA)(),
}
RAISES: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda x: x[0, 0].item(),
    "a condition": lambda x: bool(x[0, 0] > 0),
    "a list": lambda x: x.tolist(),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "devices mixed": lambda x: x + torch.zeros(3, 3),
}
SOUND: dict[str, Callable[[torch.Tensor], object]] = {
    "sent": lambda x: x[to_device(torch.tensor([0, 1]), CUDA)],
    "sent and put": lambda x: x.index_copy_(0, to_device(torch.tensor([1]), CUDA), x[:1] + 1),
    "a number in a row": lambda x: x.__setitem__(0, 1.0),
    "a scalar of the host": lambda x: x * torch.tensor(2.0),
    "chosen on the device": lambda x: torch.where(x > 0, x, 0.0),
    "a copy that is read later": HostCopy,
}


@pytest.fixture
def x(gpu: FakeCuda) -> torch.Tensor:
    return torch.zeros(3, 3, device=CUDA)


@pytest.mark.parametrize("do", FAULTS.values(), ids=FAULTS)
def test_a_wait_in_a_step_is_noted(
    gpu: FakeCuda, x: torch.Tensor, do: Callable[[torch.Tensor], object]
) -> None:
    do(x)
    assert not gpu.faults, "outside of steps anything may wait"
    with gpu.launch(), torch.inference_mode():
        do(x)
    assert len(gpu.faults) == 1


@pytest.mark.parametrize("do", RAISES.values(), ids=RAISES)
def test_what_a_step_cannot_know_raises(
    gpu: FakeCuda, x: torch.Tensor, do: Callable[[torch.Tensor], object]
) -> None:
    with gpu.launch(), torch.inference_mode(), pytest.raises(Exception, match=r"aten|devices"):
        do(x)


@pytest.mark.parametrize("do", SOUND.values(), ids=SOUND)
def test_what_does_not_wait_is_no_fault(
    gpu: FakeCuda, x: torch.Tensor, do: Callable[[torch.Tensor], object]
) -> None:
    with gpu.launch(), torch.inference_mode():
        do(x)
    assert not gpu.faults


def test_a_copy_arrives_with_its_event(gpu: FakeCuda, x: torch.Tensor) -> None:
    with gpu.launch():
        copy, flag = HostCopy(x[0]), HostCopy(x[0] > 0)
    assert copy._host.isnan().all(), "nothing has arrived"
    end = end_of_work(CUDA)
    with gpu.result():
        end()
        assert copy.get().tolist() == [0.0, 0.0, 0.0]
        assert flag.get().tolist() == [True, True, True]
        assert not copy.get().isnan().any(), "it is there to be read again"
    assert gpu.num_read == 2
    with gpu.launch():
        copy.get()
    assert not gpu.faults, "what has arrived is not waited for"


def test_a_result_may_wait_for_events_alone(gpu: FakeCuda, x: torch.Tensor) -> None:
    with gpu.result():
        x.cpu()
    assert len(gpu.faults) == 1
    with gpu.result(), pytest.raises(DataDependentOutputException):
        bool(x.isfinite().all())


def test_bytes_are_counted_while_they_live(gpu: FakeCuda) -> None:
    kept = torch.zeros(256, device=CUDA)
    assert gpu.live_bytes == 1024
    with gpu.launch():
        view = kept[:3].view(1, 3)
        other = (kept + 1).sum()
    assert (gpu.peak_bytes, gpu.live_bytes) == (2052, 1028)
    del kept, other
    assert gpu.live_bytes == 1024, "a view keeps the whole"
    del view
    assert gpu.live_bytes == 0


def test_the_host_computes_as_ever(gpu: FakeCuda) -> None:
    values = torch.arange(3) * 2
    assert not isinstance(values, FakeTensor)
    assert values.tolist() == [0, 2, 4]
    assert isinstance(to_device(values, CUDA), FakeTensor)


def test_numbers_of_the_host_are_known_but_read_at_a_cost(gpu: FakeCuda) -> None:
    sizes = torch.tensor([2, 3], device=CUDA)
    with gpu.launch(), torch.inference_mode():
        assert (sizes * 2).tolist() == [4, 6]
    assert len(gpu.faults) == 2
