"""Files that are there whole or not at all.

Owns how a file takes its place. Knows nothing of what is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

_PREFIX, _SUFFIX = ".triptych-", ".partial"


def write_whole(path: Path, parts: Iterable[bytes], *, is_durable: bool = True) -> None:
    """Put a file in its place when all of it is written, and on the disk. Raises `OSError`.

    One that is not durable may be lost, or damaged, by a power cut: it is soon made again.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=_PREFIX, suffix=_SUFFIX, delete=False) as file:
        try:
            file.writelines(parts)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def remove_partial(folder: Path) -> None:
    """Take away what writers that were killed have left here; none may be at work."""
    for left in folder.glob(f"{_PREFIX}????????{_SUFFIX}"):
        left.unlink(missing_ok=True)
