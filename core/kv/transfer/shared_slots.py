"""Shared memory that pages cross in between two processes of one host, in slots of a page each.

Owns the memory, made by the receiving end and sealed: neither end can make it smaller under the
other. Knows no messages. Linux alone has such memory; elsewhere pages stay within the stream.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import sys
from contextlib import suppress
from typing import Self

IS_OFFERED = sys.platform == "linux"
_NAME = "triptych-pages"


class SharedSlots:
    """`num_slots` slots of `slot_bytes` each."""

    def __init__(self, descriptor: int, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._map = mmap.mmap(descriptor, num_slots * slot_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def make(cls, num_slots: int, slot_bytes: int) -> tuple[Self, int]:
        """New memory, and its descriptor, which the caller closes once it is handed over."""
        assert sys.platform == "linux", "the caller asks `IS_OFFERED`"
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
        """The memory behind a descriptor, which is closed; none if it is not what it should be."""
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

    async def carry(self, is_lent: asyncio.Event) -> None:
        """What the sending end has to do while slots are lent: nothing."""

    async def arrive(self, index: int, num_bytes: int) -> None:
        """What the receiving end has to do for a slot's bytes: nothing, they are there."""

    def close(self) -> None:
        """Unmap it, as soon as no view of a slot is left."""
        with suppress(BufferError):
            self._view.release()
            self._map.close()


def _seals() -> int:
    assert sys.platform == "linux", "the caller asks `IS_OFFERED`"
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
