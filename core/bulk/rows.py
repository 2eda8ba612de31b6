"""Rows: what each asks for, the names by which they are known again, and what comes of them.

Owns the reading of JSON Lines and of OpenAI's batch files. Knows no modality: which fields a row
may have is its pipeline's to say.
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
"""Fields of a row that are the caller's own: they come back with the result."""
_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRow:
    """A row of the input, as `entry` says it, and what a pipeline is `asked` for it.

    `key` names it among all rows, whichever run reads them. Names of its files begin with `stem`;
    `version` is that of a file which it names. A row that is wrong has its `error` at once.
    """

    number: int
    entry: Record
    asked: Record
    key: str = ""
    stem: str = ""
    version: str = ""
    error: TriptychError | None = None


class RowResult(msgspec.Struct, frozen=True):
    """What comes of a row: fields of its record, and files by the ends of their names."""

    record: Record
    files: dict[str, bytes] = {}

    @classmethod
    def failed(cls, error: TriptychError) -> RowResult:
        """The result of a row that has none."""
        return cls({"error": {"code": error.code, "message": error.message}})

    @property
    def error(self) -> Mapping[str, str] | None:
        """Code and message of what went wrong."""
        found: Mapping[str, str] | None = self.record.get("error")
        return found


class RowFields(BaseModel):
    """The fields that a row may have, declared by its modality; others are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, asked: Record) -> Self | InvalidRequest:
        """The fields of a row, or what is wrong with them."""
        try:
            return cls.model_validate(asked)
        except ValidationError as error:
            first = error.errors()[0]
            place = str(first["loc"][0]) if first["loc"] else None
            return InvalidRequest(f"{place or 'The row'}: {first['msg']}.", param=place)


def read_rows(flag: str, path: str, url: str) -> list[BulkRow]:
    """The rows of a JSON Lines file, of all `*.jsonl` of a folder, or of stdin (`-`).

    A line in the form of OpenAI's batches asks for its `body`, if its `url` is this one. Raises
    `ConfigError` where nothing can be read.
    """
    folder = Path(path).expanduser()
    is_folder = path != STDIN and folder.is_dir()
    files = [str(each) for each in sorted(folder.glob("*.jsonl"))] if is_folder else [path]
    lines = [text for file in files for _, text in read_lines(flag, file)]
    if not lines:
        raise ConfigError(f"{flag} {path}: there are no lines to read.")
    return [_read_row(number, line, url) for number, line in enumerate(lines, start=1)]


def _read_row(number: int, line: str, url: str) -> BulkRow:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        error = InvalidRequest("The line is no JSON object.")
        return BulkRow(number=number, entry={"line": number}, asked={}, error=error)
    try:
        return BulkRow(number=number, entry=entry, asked=_asked(entry, url))
    except InvalidRequest as error:
        return BulkRow(number=number, entry=entry, asked={}, error=error)


def _asked(entry: Record, url: str) -> Record:
    """What is asked for: all but the labels, or the body of a batch's line."""
    if "body" not in entry:
        return {name: value for name, value in entry.items() if name not in LABELS}
    if unknown := entry.keys() - _ENVELOPE:
        raise InvalidRequest(f"{min(unknown)} is no field of a batch's line.", param=min(unknown))
    if entry.get("method", "POST") != "POST" or entry.get("url", url) != url:
        raise InvalidRequest(f"Lines are for POST {url} here.", param="url")
    if not isinstance(entry["body"], dict):
        raise InvalidRequest("The body is no JSON object.", param="body")
    return dict(entry["body"])


KEY: Final = re.compile(r"[0-9a-f]{24}(?:-[0-9]+)?")
"""What the keys that `with_keys` makes look like."""


def with_keys(rows: Iterable[BulkRow], shared: Mapping[str, Any]) -> list[BulkRow]:
    """The rows with their keys, which follow from what they and the command (`shared`) say.

    A row keeps its key when others come, go or change places; equal rows are told apart by how
    many came before.
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


def refuse_shared_names(rows: Sequence[BulkRow]) -> None:
    """Raise `ConfigError` where the files of two rows would have one name."""
    owners: dict[str, BulkRow] = {}
    for row in rows:
        other = owners.setdefault(row.stem, row)
        if other is not row:
            raise ConfigError(
                f"Rows {other.number} and {row.number} would be written to files of one name,"
                f" {row.stem}; do them apart."
            )
