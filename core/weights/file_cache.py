"""Weights in the system's file cache: what is left of a model in memory once it is unloaded.

Owns the advice to the system. It is a hint: systems without it, and a system short of memory, keep
what they like.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

_log = logging.getLogger(__name__)


def advise(folders: Iterable[str], *, is_kept: bool) -> None:
    """Ask the system to keep the weights in `folders`, and their parts, in its file cache or not.

    Blocks until the advice is given; reading goes on behind it.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    advice = os.POSIX_FADV_WILLNEED if is_kept else os.POSIX_FADV_DONTNEED
    for folder in map(Path, folders):
        for file in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")):
            try:
                descriptor = os.open(file, os.O_RDONLY)
            except OSError as error:
                _log.debug("%s cannot be opened: %s", file.name, error)
                continue
            try:
                os.posix_fadvise(descriptor, 0, 0, advice)
            finally:
                os.close(descriptor)
