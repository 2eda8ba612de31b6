"""Small arrays on their way to the device, all of a step in one copy.

Owns the pinned buffers, which are used in turn: a GPU's copy from memory that is not pinned would
be waited for. On a CPU an array is its own tensor. Used from one thread, on one stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[np.int64] | NDArray[np.float64]

_MIN_SIZE = 1024
_DTYPES = MappingProxyType({np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64})


class CopyEvent(Protocol):
    """What `torch.Event` has of use here."""

    def record(self) -> None:
        """Mark this place in the stream's work."""
        ...

    def query(self) -> bool:
        """Whether that place is passed."""
        ...


@dataclass(slots=True)
class _Buffer:
    """Pinned memory, and the event behind the last copies from it."""

    numbers: torch.Tensor
    event: CopyEvent


class Uploads:
    """Brings over arrays of 8-byte numbers."""

    def __init__(
        self,
        device: torch.device,
        *,
        new_buffer: Callable[[int], torch.Tensor] | None = None,
        new_event: Callable[[], CopyEvent] | None = None,
    ) -> None:
        """By default buffers are pinned, and events the device's."""
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._new_buffer = new_buffer or _pinned
        self._new_event = new_event or partial(torch.Event, device, blocking=True)
        self._used: deque[_Buffer] = deque()  # the first is the next that will have been read
        self._last: _Buffer | None = None

    def send(self, arrays: Sequence[Numbers]) -> list[torch.Tensor]:
        """The arrays, flat, on the device, in their types."""
        if self._is_cpu:
            return [torch.from_numpy(np.ascontiguousarray(array).reshape(-1)) for array in arrays]
        packed = self.pack(arrays).to(self._device, non_blocking=True)
        ends = np.cumsum([array.size for array in arrays]).tolist()
        parts = packed.tensor_split(ends[:-1])
        return [part.view(_DTYPES[array.dtype]) for part, array in zip(parts, arrays, strict=True)]

    def pack(self, arrays: Sequence[Numbers]) -> torch.Tensor:
        """The arrays one after the other on the host, to be copied from before the next call."""
        bits = [array.ravel().view(np.int64) for array in arrays]
        if self._is_cpu:
            return torch.from_numpy(np.concatenate(bits))
        if self._last is not None:
            self._last.event.record()  # what was copied from it is launched by now
            self._used.append(self._last)
        size = sum(map(len, bits))
        self._last = self._free(size)
        packed = self._last.numbers[:size]
        np.concatenate(bits, out=packed.numpy())
        return packed

    def _free(self, size: int) -> _Buffer:
        """One that is not being read; a new one where all are, so that nobody waits."""
        length = max(_MIN_SIZE, 1 << max(size - 1, 0).bit_length())
        if not self._used or not self._used[0].event.query():
            return _Buffer(self._new_buffer(length), self._new_event())
        buffer = self._used.popleft()
        if len(buffer.numbers) < size:
            buffer.numbers = self._new_buffer(length)
        return buffer


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, pin_memory=True)
