"""transformers' own progress bar, off while we report.

Owns the switch, which is global to transformers and is put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Loading inside shows no bar of transformers'."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
