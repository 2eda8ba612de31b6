"""Small arrays on their way to the device, all arrays of a step in one copy.

Owns the pinned buffers, which are used in turn: a copy from memory that is not pinned would block.
While the device still reads the next buffer another one is added, so that nothing here waits. On a
CPU an array is its own tensor. Used from one thread, on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64] | NDArray[np.float64]

_NUM_BUFFERS = 8  # the number of copies in a few plain steps
_MIN_SIZE = 1024
_EMPTY = torch.empty(0, dtype=torch.int64)
_DTYPES = MappingProxyType({np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64})


class CopyEvent(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self) -> None:
        """Mark this place in the stream's work."""
        ...

    def query(self) -> bool:
        """Whether that place has been passed; true for an event that was never recorded."""
        ...


class Uploads:
    """Uploads arrays of 8-byte numbers."""

    def __init__(
        self,
        device: torch.device,
        *,
        new_buffer: Callable[[int], torch.Tensor] | None = None,
        new_event: Callable[[], CopyEvent] | None = None,
    ) -> None:
        """By default buffers are pinned, and events are the device's."""
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._new_buffer = new_buffer or _pinned
        self._new_event: Callable[[], CopyEvent] = new_event or torch.cuda.Event
        self._buffers = [_EMPTY] * _NUM_BUFFERS
        self._events = [] if self._is_cpu else [self._new_event() for _ in range(_NUM_BUFFERS)]
        self._last = 0

    def send(self, arrays: Sequence[Numbers]) -> list[torch.Tensor]:
        """The arrays, flat, on the device, in their types."""
        if self._is_cpu:
            return [torch.from_numpy(np.ascontiguousarray(array).reshape(-1)) for array in arrays]
        packed = self.pack(arrays).to(self._device, non_blocking=True)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        parts = packed.tensor_split(ends[:-1])
        return [part.view(_DTYPES[array.dtype]) for part, array in zip(parts, arrays, strict=True)]

    def pack(self, arrays: Sequence[Numbers]) -> torch.Tensor:
        """The arrays one after the other on the host, to be copied before the next call."""
        bits = [array.ravel().view(np.int64) for array in arrays]
        if self._is_cpu:
            return torch.from_numpy(np.concatenate(bits))
        self._events[self._last].record()  # the copy from the last buffer has been launched
        self._last = place = (self._last + 1) % len(self._buffers)
        if not self._events[place].query():
            self._buffers.insert(place, _EMPTY)
            self._events.insert(place, self._new_event())
        size = sum(map(len, bits))
        if len(self._buffers[place]) < size:
            self._buffers[place] = self._new_buffer(max(_MIN_SIZE, 1 << (size - 1).bit_length()))
        packed = self._buffers[place][:size]
        np.concatenate(bits, out=packed.numpy())
        return packed


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, pin_memory=True)
