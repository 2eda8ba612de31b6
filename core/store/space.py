"""Disk space reserved for deletions from a store.

Owns the reserve, a file next to the database, and shrinking the database with it. On a full disk
even a deletion needs space, for the write-ahead log; without a reserve no space could be freed.
Knows no documents.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from triptych.core.store.schema import (
    IN_MEMORY,
    can_shrink,
    num_bytes,
    num_free_pages,
    purge,
    release_pages,
)

RESERVE_BYTES: Final = 2**20
_SLACK_BYTES: Final = 2**16
"""Bytes that a transaction writes in addition: indexes, and partly filled pages."""
_PAGES_AT_ONCE: Final = 32
"""Pages released together: few enough that their changes fit into the reserve."""


def is_full(error: sqlite3.Error) -> bool:
    """Whether the error is a full disk."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


class DiskReserve:
    """The reserve of the database in the file `place`; a database in memory needs none."""

    def __init__(self, connection: sqlite3.Connection, place: str) -> None:
        self._connection = connection
        self._database = None if place == IN_MEMORY else Path(place).expanduser()
        self._take()

    def has_room(self, num_added_bytes: int) -> bool:
        """Whether a transaction that adds `num_added_bytes` may be committed.

        It is written to the log and must also fit into the database: a log that can never be
        applied would hold its space forever.
        """
        return self._take() and self._has_free(num_added_bytes + _SLACK_BYTES)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the reserve for the block, then shrink the database and refill the reserve.

        Deletions need little space if freed pages are not overwritten, so overwriting is off inside
        the block: shrinking removes those pages from the file.
        """
        if self._reserve is not None:
            with suppress(OSError):
                self._reserve.unlink(missing_ok=True)
        if can_shrink(self._connection):
            self._connection.execute("PRAGMA secure_delete = FAST")
        try:
            yield
        finally:
            self._connection.execute("PRAGMA secure_delete = ON")
            with suppress(sqlite3.OperationalError):  # as far as space allows
                self.shrink()
            self._take()

    def shrink(self) -> None:
        """Return free pages to the disk, and empty the log. Raises `sqlite3.Error`."""
        while can_shrink(self._connection) and num_free_pages(self._connection):
            release_pages(self._connection, _PAGES_AT_ONCE)
            self._empty_log()
        self._empty_log()

    def _empty_log(self) -> None:
        if self._has_free(0):  # otherwise the attempt would use up the remaining space
            purge(self._connection)

    def _has_free(self, num_more_bytes: int) -> bool:
        """Whether the disk has `num_more_bytes` left after the log is applied to the database."""
        if self._database is None:
            return True
        try:
            disk, file = os.statvfs(self._database), self._database.stat()
        except OSError:  # the file was moved meanwhile: SQLite will report it
            return True
        missing = max(0, num_bytes(self._connection) - file.st_size)
        return disk.f_bavail * disk.f_frsize >= missing + num_more_bytes

    @property
    def _reserve(self) -> Path | None:
        return None if self._database is None else Path(f"{self._database}.reserve")

    def _take(self) -> bool:
        """Create the reserve if there is space; returns whether it exists."""
        return self._reserve is None or _has_size(self._reserve) or _fill(self._reserve)


def _has_size(file: Path) -> bool:
    with suppress(OSError):
        return file.stat().st_size == RESERVE_BYTES
    return False


def _fill(file: Path) -> bool:
    """Write the reserve, or nothing if space is short. Its bytes are incompressible."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as opened:
            opened.write(os.urandom(RESERVE_BYTES))
            opened.flush()
            os.fsync(descriptor)
    except OSError:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return False
    return True
