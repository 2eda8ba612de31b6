"""Huge pages of the system: whether it has them, and whether they hold a piece of memory.

Reads Linux's files. Other systems have none to ask for.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SMAPS = Path("/proc/self/smaps")
_AREA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_LEAST_SHARE = 0.8  # the last page of a file is a small one


def has_huge_pages() -> bool:
    """Whether the system gives a program huge pages for memory that asks for them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        return "[never]" not in _ENABLED.read_text(encoding="ascii")
    except OSError:
        return False


def is_in_huge_pages(address: int) -> bool:
    """Whether the mapping of a file at this address, which has been read, is in huge pages."""
    try:
        with _SMAPS.open(encoding="utf-8") as lines:
            return _share(lines, address) >= _LEAST_SHARE
    except OSError:
        return False


def _share(lines: Iterable[str], address: int) -> float:
    """The share of a mapping's pages that are huge; 0 where the system does not say."""
    sizes: dict[str, int] = {}
    is_here = False
    for line in lines:
        if (area := _AREA.match(line)) is not None:
            if is_here:
                break
            is_here = int(area[1], 16) <= address < int(area[2], 16)
        elif is_here and line.endswith("kB\n"):
            name, _, size = line.partition(":")
            sizes[name] = int(size.split()[0])
    return sizes.get("FilePmdMapped", 0) / max(sizes.get("Rss", 0), 1)
