"""The record of a batch in the store.

Owns the record and the transactions on it. Knows no route and no line.
"""

from __future__ import annotations

import time
from copy import copy
from typing import Literal

import msgspec

from triptych.core.errors import Overloaded
from triptych.core.http.batches.lines import Endpoint
from triptych.core.http.files.user_files import finish, grow
from triptych.core.limits import MAX_ACTIVE_BATCHES
from triptych.core.process.typed import decode_json
from triptych.core.store.documents import Document, DocumentTable, Key

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
KIND = "batch"
_ACTIVE = "active"
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchFault(msgspec.Struct, frozen=True):
    """The reason why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch. `times` are the moments when it entered each status.

    `growing` are the ids of its unfinished output and error files.
    """

    id: str
    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    ends_s: float
    times: dict[str, float]
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    growing: tuple[str, str] = ("", "")
    files_expire_s: float
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_lines: int = 0
    num_good: int = 0
    num_bad: int = 0
    faults: list[BatchFault] = []
    spare: str = " " * 1024
    """Reserved space, so that the final status also fits into a full store."""

    @property
    def is_over(self) -> bool:
        """Whether the batch has ended."""
        return self.status in _ENDED

    @property
    def is_cancelled(self) -> bool:
        """Whether its owner cancelled it."""
        return "cancelling" in self.times

    def enter(self, status: Status) -> None:
        """Enter a status now."""
        self.status = status
        self.times[status] = time.time()

    def count(self, good: bytes, bad: bytes) -> None:
        """Count the lines that were written to the files."""
        self.num_good += good.count(b"\n")
        self.num_bad += bad.count(b"\n")


def create(table: DocumentTable, key: Key, record: BatchRecord, expires_s: float) -> None:
    """Store a new batch. Raises `Overloaded` if its owner has too many active ones."""
    own = [each for each in table.with_status(KIND, _ACTIVE) if each.key.owner == key.owner]
    if len(own) >= MAX_ACTIVE_BATCHES:
        raise Overloaded(
            f"You have {MAX_ACTIVE_BATCHES} batches in progress, the maximum; try again later.",
            retry_after_s=60.0,
        )
    table.add(
        Document(
            key=key,
            body=msgspec.json.encode(record),
            status=_ACTIVE,
            is_lasting=True,
            created_s=record.times["created"],
            expires_s=expires_s,
        )
    )


def active(table: DocumentTable) -> list[tuple[Key, BatchRecord]]:
    """Return the active batches of all callers."""
    return [(found.key, decode(found)) for found in table.with_status(KIND, _ACTIVE)]


def decode(document: Document) -> BatchRecord:
    """Return the batch in a document."""
    return decode_json(document.body, BatchRecord)


def save(table: DocumentTable, key: Key, record: BatchRecord) -> None:
    """Store the current state of a batch."""
    table.replace(key, msgspec.json.encode(record), "" if record.is_over else _ACTIVE)


def write(table: DocumentTable, key: Key, record: BatchRecord, *, good: bytes, bad: bytes) -> None:
    """Append results to a batch's files, and store its state.

    The caller's `record` counts them once the transaction is done.
    """
    for file_id, data in zip(record.growing, (good, bad), strict=True):
        if data:
            grow(table, key.owner, file_id, data)
    grown = copy(record)
    grown.count(good, bad)
    save(table, key, grown)


def end(table: DocumentTable, key: Key, record: BatchRecord, status: Status) -> None:
    """Publish the files of a batch, and set its final status."""
    output, errors = record.growing
    record.output_file_id = output if finish(table, key.owner, output) else None
    record.error_file_id = errors if finish(table, key.owner, errors) else None
    record.enter(status)
    record.spare = ""
    save(table, key, record)
