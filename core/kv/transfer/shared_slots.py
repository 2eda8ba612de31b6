"""Shared memory for page transfers between two processes on one host, in slots of one page.

Owns the memory, created by the receiving end and sealed, so that neither end can shrink it under
the other. Knows no messages. Only Linux has sealed memory; elsewhere pages stay in the stream.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import sys
from contextlib import suppress
from typing import Self

IS_SUPPORTED = sys.platform == "linux"
_NAME = "triptych-pages"


class SharedSlots:
    """A mapping of `num_slots` slots of `slot_bytes` each."""

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._map = mmap.mmap(descriptor, num_slots * slot_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def make(cls, num_slots: int, slot_bytes: int) -> tuple[Self, int]:
        """New memory, and its descriptor, which the caller closes after sending it."""
        assert sys.platform == "linux", "the caller checks `IS_SUPPORTED`"
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_slots * slot_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
            return cls(descriptor, num_slots, slot_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def take(cls, descriptor: int, num_slots: int, slot_bytes: int) -> Self | None:
        """Map the memory of a descriptor and close it; `None` if its size or seals are wrong."""
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
            if is_sealed and os.fstat(descriptor).st_size == num_slots * slot_bytes:
                return cls(descriptor, num_slots, slot_bytes)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return None

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        assert 0 <= index < self.num_slots, "no such slot"
        return self._view[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    async def drive_progress(self, has_in_flight: asyncio.Event) -> None:
        """Do nothing: shared memory needs no progress calls."""

    async def read_slot(self, index: int, num_bytes: int) -> None:
        """Do nothing: the bytes are already in shared memory."""

    def close(self) -> None:
        """Unmap the memory, unless a view of a slot is still in use."""
        with suppress(BufferError):
            self._view.release()
            self._map.close()


def _seals() -> int:
    assert sys.platform == "linux", "the caller checks `IS_SUPPORTED`"
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
