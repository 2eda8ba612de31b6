"""Silences the loading messages of libraries, in favour of our report.

Owns the switches, which are global to the libraries and are restored, and the lock that lets
transformers load one model at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_alone = threading.RLock()


@contextmanager
def transformers_loading() -> Iterator[None]:
    """Hide transformers' progress bar inside, and wait for loads of other threads.

    transformers replaces functions of torch while it creates a model. Where two threads do so at
    once, those of the first stay, and models created later lack their frequencies.
    """
    from transformers.utils import logging as transformers_logging

    with _alone:
        was_enabled = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if was_enabled:
                transformers_logging.enable_progress_bar()


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Silence warnings of the logger `name` inside."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
