"""Memory that was freed, back to the system. Knows nothing of who freed it."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Have glibc give back what it keeps; with other C libraries nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
