"""One model of transformers is made at a time, without its progress bar."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from transformers.utils import logging

from triptych.core.runtime.tensors.quiet import transformers_loading


def test_threads_load_one_after_another() -> None:
    inside: list[int] = []

    def load(number: int) -> bool:
        with transformers_loading():
            inside.append(number)
            time.sleep(0.01)
            was_alone = inside == [number] and not logging.is_progress_bar_enabled()
            inside.remove(number)
            return was_alone

    was_enabled = logging.is_progress_bar_enabled()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(8)))
    assert logging.is_progress_bar_enabled() == was_enabled
