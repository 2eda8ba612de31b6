"""Values computed once, on first use, under a lock.

`functools.cache` holds no lock while it computes: two threads that call first run the function at
the same time, which is only safe for functions that are themselves thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, TypeVar

Made = TypeVar("Made")


class once(Generic[Made]):  # noqa: N801 - used as a decorator
    """Calls `make` once; concurrent callers wait and get the same value."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: list[Made] = []
        self._lock = threading.Lock()
        update_wrapper(self, make)

    def __call__(self) -> Made:
        """The value. If `make` raises, the error is passed on and the next call tries again."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]
