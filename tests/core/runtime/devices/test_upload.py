"""Arrays arrive as they are; buffers are used in turn, and never while a copy may read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.core.runtime.devices.upload import Uploads

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
ARRAYS = (
    np.arange(6).reshape(2, 3),
    np.array([0.5, -1.25]),
    np.zeros(0, np.int64),
    np.arange(8)[::2],
)


class FakeEvent:
    def __init__(self, number: int, log: list[tuple[str, int]]) -> None:
        self.number, self.log, self.is_busy = number, log, False

    def record(self) -> None:
        self.log.append(("record", self.number))

    def query(self) -> bool:
        self.log.append(("look", self.number))
        return not self.is_busy


class Rig:
    """Uploads to a device that is not a CPU, with memory that is not pinned."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.events: list[FakeEvent] = []
        self.sizes: list[int] = []
        self.uploads = Uploads(ELSEWHERE, new_buffer=self._buffer, new_event=self._event)

    def _buffer(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return torch.full((size,), -1)

    def _event(self) -> FakeEvent:
        self.events.append(FakeEvent(len(self.events), self.log))
        return self.events[-1]


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
    num_calls, ring = 20, len(rig.events)
    for _ in range(num_calls):
        rig.uploads.pack(ARRAYS)
    turns = [(call % ring, (call + 1) % ring) for call in range(num_calls)]
    assert rig.log == [
        event for last, this in turns for event in (("record", last), ("look", this))
    ]


def test_where_copies_are_under_way_there_is_a_buffer_more() -> None:
    rig = Rig()
    ring = len(rig.events)
    for _ in range(2 * ring):
        rig.uploads.pack(ARRAYS)
        for event in rig.events:
            event.is_busy = True
    assert len(rig.events) > ring
    for event in rig.events:
        event.is_busy = False
    num_events = len(rig.events)
    rig.log.clear()
    for _ in range(2 * num_events):
        rig.uploads.pack(ARRAYS)
    assert len(rig.events) == num_events
    assert {number for kind, number in rig.log if kind == "record"} == set(range(num_events))


def test_buffers_are_allocated_once_and_again_only_to_grow() -> None:
    rig = Rig()
    for _ in range(5 * len(rig.events)):
        rig.uploads.pack(ARRAYS)
    assert len(rig.sizes) == len(rig.events)
    rig.uploads.pack([np.zeros(5000, np.int64)])
    assert rig.sizes[-1] == 8192
