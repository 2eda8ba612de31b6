"""Opening a file of unknown origin.

Owns the proof that it is a file: opening a FIFO waits for a writer, a device has no end, and a
socket is neither. All of them are an `OSError`, like any other file that cannot be read.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | Path) -> BufferedReader:
    """`path`, opened to be read, at once. Raises `OSError` for what is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is no regular file")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(path: str | Path) -> None:
    """Raises `OSError` for what `open_regular` would not open. For files that libraries read."""
    open_regular(path).close()


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """What is in `path`. Raises `OSError` as `open_regular` does, and for a file over the bound."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"It is over {max_bytes} bytes")
    return data
