"""Rows of a bulk run: their requests, keys and results.

Owns reading JSON Lines and OpenAI's batch files. Knows no modality: the pipeline defines the fields
of a row.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from triptych.core.errors import ConfigError, InvalidRequest, TriptychError
from triptych.core.process.cli_io import STDIN, read_lines

Record = dict[str, Any]

LABELS = frozenset({"id", "custom_id"})
"""Fields of a row that belong to the caller and are returned with the result."""
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRow:
    """A row of the input: its parsed `entry`, and the request `asked` of the pipeline.

    `key` identifies it among all rows, the same in every run. Names of its output files begin with
    `stem`; `version` is that of an input file it names. An invalid row has its `error` at once.
    """

    number: int
    entry: Record
    asked: Record
    key: str = ""
    stem: str = ""
    version: str = ""
    error: TriptychError | None = None


class RowResult(msgspec.Struct, frozen=True):
    """The result of a row: fields of its record, and output files by name suffix."""

    record: Record
    files: dict[str, bytes] = {}

    @classmethod
    def failed(cls, error: TriptychError) -> RowResult:
        """The result of a failed row."""
        return cls({"error": {"code": error.code, "message": error.message}})

    @property
    def error(self) -> Mapping[str, str] | None:
        """Code and message of the error, if any."""
        found: Mapping[str, str] | None = self.record.get("error")
        return found


class RowFields(BaseModel):
    """The fields of a row, declared by its modality; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, asked: Record) -> Self | InvalidRequest:
        """The fields of a row, or the error that describes an invalid field."""
        try:
            return cls.model_validate(asked)
        except ValidationError as error:
            first = error.errors()[0]
            place = str(first["loc"][0]) if first["loc"] else None
            return InvalidRequest(f"{place or 'The row'}: {first['msg']}.", param=place)


def read_rows(flag: str, path: str, url: str) -> list[BulkRow]:
    """The rows of a JSON Lines file, of all `*.jsonl` of a folder, or of stdin (`-`).

    A line in the form of OpenAI's batches requests its `body`; its `url` must be `url`. Raises
    `ConfigError` if there is nothing to read.
    """
    folder = Path(path).expanduser()
    is_folder = path != STDIN and folder.is_dir()
    files = [str(each) for each in sorted(folder.glob("*.jsonl"))] if is_folder else [path]
    lines = [text for file in files for _, text in read_lines(flag, file)]
    if not lines:
        raise ConfigError(f"{flag} {path}: there are no rows to read.")
    return [_read_row(number, line, url) for number, line in enumerate(lines, start=1)]


def _read_row(number: int, line: str, url: str) -> BulkRow:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        error = InvalidRequest("The line is not a JSON object.")
        return BulkRow(number=number, entry={"line": number}, asked={}, error=error)
    try:
        return BulkRow(number=number, entry=entry, asked=_asked(entry, url))
    except InvalidRequest as error:
        return BulkRow(number=number, entry=entry, asked={}, error=error)


def _asked(entry: Record, url: str) -> Record:
    """The request of a row: all fields except the labels, or the body of a batch line."""
    if "body" not in entry:
        return {name: value for name, value in entry.items() if name not in LABELS}
    if unknown := entry.keys() - _ENVELOPE:
        raise InvalidRequest(f"{min(unknown)} is not a field of batch lines.", param=min(unknown))
    if entry.get("method", "POST") != "POST" or entry.get("url", url) != url:
        raise InvalidRequest(f"Lines are for POST {url} here.", param="url")
    if not isinstance(entry["body"], dict):
        raise InvalidRequest("The body is not a JSON object.", param="body")
    return dict(entry["body"])


KEY: Final = re.compile(r"[0-9a-f]{24}(?:-[0-9]+)?")
"""The pattern of the keys from `assign_keys`."""


def assign_keys(rows: Iterable[BulkRow], shared: Mapping[str, Any]) -> list[BulkRow]:
    """The rows with keys, derived from their content and the command's options (`shared`).

    A row keeps its key when other rows are added, removed or reordered; equal rows are numbered in
    order.
    """
    seen: Counter[str] = Counter()
    found = []
    for row in rows:
        said = json.dumps([shared, row.entry, row.stem, row.version], sort_keys=True, default=str)
        key = blake2b(said.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        seen[key] += 1
        nth = f"-{seen[key]}" if seen[key] > 1 else ""
        found.append(replace(row, key=key + nth))
    return found


def check_unique_stems(rows: Sequence[BulkRow]) -> None:
    """Raise `ConfigError` if the output files of two rows would have the same name."""
    owners: dict[str, BulkRow] = {}
    for row in rows:
        other = owners.setdefault(row.stem, row)
        if other is not row:
            raise ConfigError(
                f"Rows {other.number} and {row.number} would be written to files of the same name,"
                f" {row.stem}; run them separately."
            )
