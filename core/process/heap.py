"""Settings of glibc's allocator: when it keeps freed memory and when it returns it to the system.

Does nothing with other C libraries. Knows nothing of the callers that allocate.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h


def trim_heap() -> None:
    """Return free memory to the system."""
    _call("malloc_trim", 0)


def return_large_blocks() -> None:
    """Return large blocks to the system when freed; by default glibc keeps more and more."""
    _call("mallopt", _M_MMAP_THRESHOLD, 2**20)


def keep_freed_memory() -> None:
    """Keep freed memory for the next step instead of returning it to the system.

    By default a large activation is mapped again each time, and its page faults cost more than
    filling it: a batch of 32 decoded three times as slowly. All threads share one arena, because
    only the main arena keeps freed memory.
    """
    _call("mallopt", _M_ARENA_MAX, 1)
    _call("mallopt", _M_MMAP_THRESHOLD, 32 * 2**20)  # the most glibc accepts
    _call("mallopt", _M_TRIM_THRESHOLD, 512 * 2**20)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
