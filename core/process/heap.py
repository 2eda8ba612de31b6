"""How glibc keeps and returns the memory of this process; other C libraries are left alone.

Owns the settings of its allocator. Knows nothing of what allocates.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h


def trim_heap() -> None:
    """Give back what is free."""
    _call("malloc_trim", 0)


def give_large_blocks_back() -> None:
    """Return what large bodies took as soon as it is free; glibc would keep ever more of it."""
    _call("mallopt", _M_MMAP_THRESHOLD, 2**20)


def keep_freed_memory() -> None:
    """Keep what is freed for the next step instead of giving it back.

    By default a large activation is mapped afresh each time, and its page faults cost more than
    filling it: a batch of 32 decoded three times as slowly. One arena for all threads, because
    only the main one keeps what it has.
    """
    _call("mallopt", _M_ARENA_MAX, 1)
    _call("mallopt", _M_MMAP_THRESHOLD, 32 * 2**20)  # the most glibc accepts
    _call("mallopt", _M_TRIM_THRESHOLD, 512 * 2**20)


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
