"""The error output of child processes while a table is on the terminal.

Owns the pipe and the thread that copies its lines to this process's `sys.stderr`, where they appear
above the table. Children that wrote to the terminal themselves would write into it.

A child that finds the pipe full waits. While this process is stopped (Ctrl-Z), only the capacity of
the pipe keeps the children running.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from contextlib import suppress

_JOIN_S = 1.0
_CAPACITY_BYTES = 2**20  # the most that Linux grants without privileges


class ChildLines:
    """A pipe for children's error output; `fd` is their end."""

    def __init__(self) -> None:
        reader, self.fd = os.pipe()
        if sys.platform == "linux":
            with suppress(OSError):  # the user has too many large pipes: 64 KiB remain
                fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, _CAPACITY_BYTES)
        self._thread = threading.Thread(
            target=_copy, args=(reader,), name="triptych-child-lines", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Wait until the lines of the ended children are copied."""
        os.close(self.fd)
        self._thread.join(_JOIN_S)


def _copy(reader: int) -> None:
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError):  # the terminal is gone or full: children must not wait for it
                sys.stderr.write(line)
                sys.stderr.flush()
