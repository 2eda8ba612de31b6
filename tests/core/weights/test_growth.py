"""The growth of a file that another program writes."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from triptych.core.weights.growth import follow_growth
from triptych.core.weights.progress import SilentProgress


class Watch(SilentProgress):
    """Adds up, and lets a test wait for an amount."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._changed = threading.Condition()

    def advance(self, num_bytes: int) -> None:
        assert num_bytes > 0
        with self._changed:
            self.num_bytes += num_bytes
            self._changed.notify_all()

    def wait(self, num_bytes: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_bytes >= num_bytes, timeout=30)


def test_the_largest_copy_counts_and_the_end_is_whole(tmp_path: Path) -> None:
    watch = Watch()
    with follow_growth(tmp_path, watch, poll_s=0.001) as growth:
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "one").write_bytes(bytes(30))
        watch.wait(30)
        (tmp_path / "copy").write_bytes(bytes(20))  # a cache of the program
        (tmp_path / "deep" / "one").write_bytes(bytes(60))
        watch.wait(60)
        shutil.rmtree(tmp_path / "deep")
    growth.report(100)
    assert watch.num_bytes == 100, "the rest is reported at the end"


def test_an_unknown_size_and_a_missing_folder_are_no_errors(tmp_path: Path) -> None:
    watch = Watch()
    with follow_growth(tmp_path / "absent", watch, poll_s=0.001) as growth:
        time.sleep(0.01)
    growth.report(0)
    assert watch.num_bytes == 0
