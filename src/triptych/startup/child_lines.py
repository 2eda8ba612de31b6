"""The error output of child processes while a table is on the terminal.

Owns the pipe and the thread that copies its lines to this process's `sys.stderr`, where they appear
above the table. Children that wrote to the terminal themselves would write into it.
"""

from __future__ import annotations

import os
import sys
import threading

_JOIN_S = 1.0


class ChildLines:
    """A pipe for children's error output; `fd` is their end."""

    def __init__(self) -> None:
        reader, self.fd = os.pipe()
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
            sys.stderr.write(line)
            sys.stderr.flush()
