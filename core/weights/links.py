"""Duplicating a file into a second folder.

Owns the choice between a hard link, which writes no bytes, and a copy.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> None:
    """Link or copy `source` to `target`. Raises `FileNotFoundError` if it does not exist."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or no support for links
        shutil.copyfile(source, target)
