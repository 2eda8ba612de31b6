"""Memory for packed weights, in huge pages where the system has them.

Owns the packing of weights of a few megabytes into whole huge pages: a decode step reads all
weights, and with pages of 4 KiB it waits for the page tables (5 to 7 % of a step on two Zen 5
cores). Knows nothing of the stored weights.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 8 * _PAGE_BYTES
_ALIGNMENT = 64


class Arena:
    """Allocates tensors from chunks of 16 MiB; larger ones get a chunk each.

    A chunk goes back to the system with the last of its tensors; the current one is kept. Threads
    may share an arena.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor that begins on a cache line."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if size > len(self._rest):
                chunk = _chunk(max(size, _CHUNK_BYTES))
                if size >= _CHUNK_BYTES:  # the rest of the current chunk may still be useful
                    return chunk[:num_bytes].view(dtype).view(shape)
                self._rest = chunk
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken.view(dtype).view(shape)


def _chunk(num_bytes: int) -> torch.Tensor:
    """Allocate bytes that begin on a huge page."""
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_B = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -bytes_B.data_ptr() % _PAGE_BYTES
    return bytes_B[skipped : skipped + num_bytes]
