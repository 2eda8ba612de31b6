"""Results of rows, kept as they come: a second run goes on from them.

Owns the JSON Lines file: a record for each row that was answered or failed, with the row's key.
While a run works, records stand in the order in which they came; at its end, in that of the rows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

from triptych.core.atomic_files import write_whole
from triptych.core.bulk.rows import Record
from triptych.core.cli_io import writing


class ResultSink(Protocol):
    """Where records go."""

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
        if path.is_file():
            with writing(path), path.open("rb") as file:
                for line in file:
                    self._note(line)

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
        with writing(self.path), open(self.path if known else os.devnull, "rb") as file:
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

    def _note(self, line: bytes) -> None:
        """Remember a line; one that could not be finished does not count."""
        start, self._end = self._end, self._end + len(line)
        if not line.endswith(b"\n"):
            return
        try:  # not msgspec, which refuses half a surrogate pair
            record = json.loads(line)
            key = str(record["row"])
        except (ValueError, TypeError, KeyError):
            return
        self._spans[key] = start, len(line)
        (self._failed.add if "error" in record else self._failed.discard)(key)


class PrintedResults:
    """Records on stdout, as they come. Nothing of them is kept."""

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
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may hold and UTF-8 not
        return json.dumps(record).encode() + b"\n"
