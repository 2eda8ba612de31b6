"""Results of rows, kept as they come: a second run goes on from them.

Owns the JSON Lines file: a record for each row that was answered or failed, with the row's key.
While a run works, records stand in the order in which they came, behind those of earlier runs; at
its end those of its rows are left, in the order of the rows.
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
from triptych.core.process.cli_io import writing
from triptych.core.text.json_lines import escape_line_ends


class ResultSink(Protocol):
    """Where records go."""

    def opened(self) -> AbstractContextManager[None]:
        """A context for one run, without which nothing is held or taken."""

    def holds(self, key: str) -> Record | None:
        """The record of a row that an earlier run has answered."""

    def keep(self, keys: Iterable[str]) -> None:
        """Leave these records alone, in this order."""

    def add(self, key: str, record: Record) -> None:
        """Take a record, at once."""


class ResultFile:
    """Records in a file, of which the places alone are held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, tuple[int, int]] = {}
        self._failed: set[str] = set()
        self._end = 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Take in what is there (`ResultSink`).

        Raises `ConfigError` where another run writes, and for a file that is none of results.
        """
        with writing(self.path):
            file = self.path.open("a+b")
        with file:
            self._lock(file)
            with writing(self.path):
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
        """Leave these records alone (`ResultSink`). The file is there whole, before or after."""
        known = {key: self._spans[key] for key in keys if key in self._spans}
        with writing(self.path), self.path.open("rb") as file:
            write_whole(self.path, (_read(file, *span) for span in known.values()))
        self._spans.clear()
        self._failed &= known.keys()
        self._end = 0
        for key, (_, size) in known.items():
            self._spans[key] = self._end, size
            self._end += size

    def add(self, key: str, record: Record) -> None:
        """Append a record (`ResultSink`): what breaks off later has not worked in vain."""
        line = _encoded({**record, "row": key})
        with writing(self.path), self.path.open("ab") as file:
            file.write(line)
        self._note(line)

    def _lock(self, file: BinaryIO) -> None:
        """Keep other runs out until the file is closed, or replaced at the end of this one."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_here = os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            is_here = False
        except OSError:  # a file system without locks
            return
        if not is_here:
            raise ConfigError(f"--output {self.path}: another run writes there; let it end first.")

    def _load(self, file: BinaryIO) -> None:
        """Remember the records. A last line that was not finished is taken off.

        Every other line is a record, or the file is none of ours.
        """
        file.seek(0)
        are_records = [self._note(line) for line in file if line.endswith(b"\n")]
        if not all(are_records) or (file.tell() and not are_records):
            raise ConfigError(
                f"--output {self.path}: there are no results in it that a run could go on from, but"
                " something else. Name another file."
            )
        file.truncate(self._end)

    def _note(self, line: bytes) -> bool:
        """Remember a line; whether it is a record."""
        start, self._end = self._end, self._end + len(line)
        try:  # not msgspec, which refuses half a surrogate pair
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
    """Records on stdout, as they come. Nothing of them is kept."""

    def opened(self) -> AbstractContextManager[None]:
        """There is nothing to open (`ResultSink`)."""
        return nullcontext()

    def holds(self, key: str) -> None:
        """Nothing is (`ResultSink`)."""

    def keep(self, keys: Iterable[str]) -> None:
        """What is printed stays (`ResultSink`)."""

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
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold and UTF-8 not
        return json.dumps(record).encode() + b"\n"
