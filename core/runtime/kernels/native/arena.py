"""Memory for packed weights, in huge pages where the system has them.

Owns how weights of a few megabytes lie side by side, so that whole huge pages fit into them: a
decode step reads all of them, and with pages of 4 KiB it waits for the page tables (5 to 7 % of a
step on two Zen 5 cores). Knows nothing of what is stored.
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
    """Hands out tensors from chunks of 16 MiB, larger ones a chunk of their own.

    A chunk goes back to the system with the last of its tensors; the one in use is kept. Threads
    may share an arena.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor that begins on a cache line."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if size > len(self._rest):
                chunk = _chunk(max(size, _CHUNK_BYTES))
                if size >= _CHUNK_BYTES:  # the rest of the chunk in use may still be of use
                    return chunk[:num_bytes].view(dtype).view(shape)
                self._rest = chunk
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken.view(dtype).view(shape)


def _chunk(num_bytes: int) -> torch.Tensor:
    """Bytes that begin on a huge page."""
    memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    bytes_B = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -bytes_B.data_ptr() % _PAGE_BYTES
    return bytes_B[skipped : skipped + num_bytes]
