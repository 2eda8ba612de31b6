"""Arrays arrive as they are; buffers are used in turn, and never while a copy may read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.core.devices.upload import Uploads

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
ARRAYS = (
    np.arange(6).reshape(2, 3),
    np.array([0.5, -1.25]),
    np.zeros(0, np.int64),
    np.arange(8)[::2],
)


class FakeEvent:
    """`done` are the events whose place the device has passed."""

    def __init__(self, number: int, rig: Rig) -> None:
        self.number, self.rig = number, rig

    def record(self) -> None:
        self.rig.recorded.append(self.number)
        self.rig.done.discard(self.number)

    def query(self) -> bool:
        return self.number in self.rig.done


class Rig:
    """Uploads to a device that is not a CPU, with memory that is not pinned."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.done: set[int] = set()
        self.num_events = 0
        self.sizes: list[int] = []
        self.uploads = Uploads(ELSEWHERE, new_buffer=self._buffer, new_event=self._event)

    def _buffer(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return torch.full((size,), -1)

    def _event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self.num_events - 1, self)


def test_on_a_cpu_arrays_are_their_own_tensors() -> None:
    array = np.arange(3)
    (tensor,) = Uploads(CPU).send([array])
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]


@pytest.mark.parametrize("index", range(len(ARRAYS)))
def test_values_and_types_are_kept(index: int) -> None:
    array = ARRAYS[index]
    tensor = Uploads(CPU).send(ARRAYS)[index]
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor.numpy(), array.ravel())
    assert tensor.dtype == {"i": torch.int64, "f": torch.float64}[array.dtype.kind]


@pytest.mark.parametrize("uploads", [Uploads(CPU), Rig().uploads])
def test_packed_arrays_follow_each_other(uploads: Uploads) -> None:
    packed = uploads.pack(ARRAYS).numpy()
    wanted = np.concatenate([array.ravel().view(np.int64) for array in ARRAYS])
    np.testing.assert_array_equal(packed, wanted)


def test_elsewhere_the_parts_have_their_shapes_and_types() -> None:
    sent = Rig().uploads.send(ARRAYS)
    assert [(part.device.type, part.dtype, len(part)) for part in sent] == [
        ("meta", torch.int64, 6),
        ("meta", torch.float64, 2),
        ("meta", torch.int64, 0),
        ("meta", torch.int64, 4),
    ]


def test_a_buffer_is_written_again_only_behind_the_copies_from_it() -> None:
    rig = Rig()
    first = rig.uploads.pack([np.array([1])])
    for number in range(2, 10):
        rig.uploads.pack([np.array([number])])
    assert first.tolist() == [1], "the device has not read it yet"
    assert rig.num_events == 9, "nobody waits: each copy has a buffer of its own"
    assert rig.recorded == list(range(8)), "the event of a buffer follows its copies"
    rig.done = {0, 1}
    again = rig.uploads.pack([np.array([7])])
    assert again.data_ptr() == first.data_ptr()
    rig.uploads.pack([np.array([7])])
    rig.uploads.pack([np.array([7])])
    assert rig.num_events == 10


def test_in_the_long_run_nothing_is_allocated() -> None:
    rig = Rig()
    for _ in range(50):
        rig.uploads.pack(ARRAYS)
        rig.done = set(rig.recorded[:-2])  # the device is two copies behind
    assert len(rig.sizes) == rig.num_events <= 5
    rig.uploads.pack([np.zeros(5000, np.int64)])
    assert rig.sizes[-1] == 8192
    assert rig.num_events <= 5
