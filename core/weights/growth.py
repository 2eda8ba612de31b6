"""Progress of a download that another program makes, from the sizes of its files.

Owns the thread that measures. Knows no program: the largest file in its folder is the copy
that grows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from triptych.core.weights.progress import Progress

POLL_S = 0.2


@contextmanager
def follow_growth(folder: Path, progress: Progress, poll_s: float = POLL_S) -> Iterator[Growth]:
    """Report the growth of the largest file in or below `folder` during the block."""
    growth = Growth(progress)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(poll_s):
            growth.report(_largest_bytes(folder))

    thread = threading.Thread(target=follow, name="triptych-growth", daemon=True)
    thread.start()
    try:
        yield growth
    finally:
        ended.set()
        thread.join()


class Growth:
    """Turns sizes into advances of a progress."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._num_bytes = 0

    def report(self, num_bytes: int) -> None:
        """Advance to `num_bytes`, never back: the program deletes its copies in the end."""
        if num_bytes > self._num_bytes:
            self._progress.advance(num_bytes - self._num_bytes)
            self._num_bytes = num_bytes


def _largest_bytes(folder: Path) -> int:
    """The size of the largest file; files may vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest
