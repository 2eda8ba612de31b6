"""Silences the libraries' own messages about loading, in favour of our report.

Owns the switches, which are global to the libraries and are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Loading inside shows no bar of transformers'."""
    from transformers.utils import logging as transformers_logging

    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """The logger called `name` keeps its warnings to itself inside."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
