"""Values made on first use, once, however many threads ask together.

Owns the lock around the making. `functools.cache` has none: two threads that come first run the
function together, which is harmless only where everything below it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, TypeVar

Made = TypeVar("Made")


class once(Generic[Made]):  # noqa: N801 - used as a decorator
    """`make`, called by the first caller; all others wait and get the same value."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: list[Made] = []
        self._lock = threading.Lock()
        update_wrapper(self, make)

    def __call__(self) -> Made:
        """The value. Raises what `make` raises, and calls it again next time."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]
