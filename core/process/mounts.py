"""The file system of a folder.

Reads Linux's list of mounts. Other systems have none of it.
"""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def is_in_memory(folder: Path) -> bool:
    """Whether files in a folder are in memory alone. Raises `OSError` if it is not there."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return False
    kinds = {line[2]: line[line.index("-") + 1] for line in lines}
    return kinds.get(number) in _IN_MEMORY
