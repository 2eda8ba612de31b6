"""Results of rows, stored as they arrive, so that a second run can resume.

Owns the JSON Lines file: a record for each row that was answered or failed, with the row's key.
During a run, records are appended in order of arrival, after those of earlier runs; at its end only
the records of its rows are kept, in the order of the rows.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

from triptych.core.bulk.rows import KEY, Record
from triptych.core.errors import ConfigError
from triptych.core.process.atomic_files import write_whole
from triptych.core.process.cli_io import report_write_errors
from triptych.core.text.json_lines import escape_line_ends


class ResultSink(Protocol):
    """Stores the records of one run."""

    def opened(self) -> AbstractContextManager[None]:
        """A context for one run; all other methods are called inside it."""

    def holds(self, key: str) -> Record | None:
        """The record of a row that an earlier run has answered, or `None`."""

    def keep(self, keys: Iterable[str]) -> None:
        """Keep only the records of `keys`, in this order."""

    def add(self, key: str, record: Record) -> None:
        """Store a record at once."""


class ResultFile:
    """Records in a file; only their positions are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, tuple[int, int]] = {}
        self._failed: set[str] = set()
        self._end = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the file and read its records (`ResultSink`).

        Raises `ConfigError` if another run is writing, or if the file is not a result file.
        """
        with report_write_errors(self.path):
            file = self.path.open("a+b")
        with file:
            self._lock(file)
            with report_write_errors(self.path):
                self._load(file)
            yield

    def holds(self, key: str) -> Record | None:
        """The record of a row that was answered (`ResultSink`)."""
        if key not in self._spans or key in self._failed:
            return None
        start, size = self._spans[key]
        with self.path.open("rb") as file:
            file.seek(start)
            record: Record = json.loads(file.read(size))
        return record

    def keep(self, keys: Iterable[str]) -> None:
        """Keep only the records of `keys` (`ResultSink`). The file is replaced atomically."""
        known = {key: self._spans[key] for key in keys if key in self._spans}
        with report_write_errors(self.path), self.path.open("rb") as file:
            write_whole(self.path, (_read(file, *span) for span in known.values()))
        self._spans.clear()
        self._failed &= known.keys()
        self._end = 0
        for key, (_, size) in known.items():
            self._spans[key] = self._end, size
            self._end += size

    def add(self, key: str, record: Record) -> None:
        """Append a record (`ResultSink`), so that a run that is interrupted can resume."""
        line = _encoded({**record, "row": key})
        with report_write_errors(self.path), self.path.open("ab") as file:
            file.write(line)
        self._note(line)

    def _lock(self, file: BinaryIO) -> None:
        """Lock out other runs until the file is closed, or replaced at the end of this run."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_here = os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            is_here = False
        except OSError:  # a file system without locks
            return
        if not is_here:
            raise ConfigError(
                f"--output {self.path}: another run is writing to it; wait for its end."
            )

    def _load(self, file: BinaryIO) -> None:
        """Index the records, and truncate an incomplete last line.

        Raises `ConfigError` if any complete line is not a record.
        """
        file.seek(0)
        are_records = [self._note(line) for line in file if line.endswith(b"\n")]
        if not all(are_records) or (file.tell() and not are_records):
            raise ConfigError(
                f"--output {self.path}: the file is not a result file of an earlier run; name"
                " another file."
            )
        file.truncate(self._end)

    def _note(self, line: bytes) -> bool:
        """Index a line; returns whether it is a record."""
        start, self._end = self._end, self._end + len(line)
        try:  # not msgspec, which refuses lone surrogates
            record = json.loads(line)
            key = record["row"]
        except (ValueError, TypeError, KeyError):
            return False
        if not isinstance(key, str) or not KEY.fullmatch(key):
            return False
        self._spans[key] = start, len(line)
        (self._failed.add if "error" in record else self._failed.discard)(key)
        return True


class PrintedResults:
    """Records printed to stdout as they arrive, and not stored."""

    def opened(self) -> AbstractContextManager[None]:
        """A context that does nothing (`ResultSink`)."""
        return nullcontext()

    def holds(self, key: str) -> None:
        """Return `None`: no records are stored (`ResultSink`)."""

    def keep(self, keys: Iterable[str]) -> None:
        """Do nothing: records are already printed (`ResultSink`)."""

    def add(self, key: str, record: Record) -> None:
        """Print a record (`ResultSink`)."""
        sys.stdout.write(_encoded(record).decode())
        sys.stdout.flush()


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _encoded(record: Record) -> bytes:
    try:
        return escape_line_ends(json.dumps(record, ensure_ascii=False).encode()) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, valid in JSON but not in UTF-8
        return json.dumps(record).encode() + b"\n"
