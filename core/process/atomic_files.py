"""Atomic file writes: a file is complete or absent.

Owns the temporary file and the rename. Knows nothing of the content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile

_PREFIX, _SUFFIX = ".triptych-", ".partial"


def write_whole(
    path: Path,
    parts: Iterable[bytes | memoryview],
    *,
    is_durable: bool = True,
    mode: int = 0o644,
) -> None:
    """Write `path`, with permissions `mode`, through a temporary file and a rename.

    Raises `OSError`.

    `is_durable` flushes to disk before the rename. Without it a power cut may lose or damage the
    file, which suits content that can be recreated.
    """
    with NamedTemporaryFile(dir=path.parent, prefix=_PREFIX, suffix=_SUFFIX, delete=False) as file:
        try:
            file.writelines(parts)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def remove_partial(folder: Path) -> None:
    """Remove the temporary files of killed writers; no writer may be active in `folder`."""
    for left in folder.glob(f"{_PREFIX}????????{_SUFFIX}"):
        left.unlink(missing_ok=True)
