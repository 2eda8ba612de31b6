"""Opening files of unknown origin.

Owns the check that a path is a regular file: opening a FIFO waits for a writer, and a device has no
end. Anything else raises `OSError`, like any file that cannot be read.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: str | Path) -> BufferedReader:
    """Open `path` for reading without blocking. Raises `OSError` unless it is a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "It is not a regular file")
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def check_regular(path: str | Path) -> None:
    """Raise `OSError` where `open_regular` would. For files that a library opens itself."""
    open_regular(path).close()


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """The content of `path`. Raises `OSError` as `open_regular` does, and above `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"It is larger than {max_bytes} bytes")
    return data
