"""What is made when it is first asked for, once, whichever threads ask together.

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
    """`make`, called by whoever comes first; all others wait for it and get what it made."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._make = make
        self._made: list[Made] = []
        self._lock = threading.Lock()
        update_wrapper(self, make)

    def __call__(self) -> Made:
        """What was made. Raises what making it raises, each time anew."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(self._make())
        return self._made[0]
