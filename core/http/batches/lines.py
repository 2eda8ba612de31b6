"""The lines of a batch: splitting of files, validation, and results.

Owns the fields of a line and of its result. An invalid line does not affect other lines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import StringConstraints, ValidationError

from triptych.core.errors import InvalidRequest, PayloadTooLarge, TriptychError, UnsupportedOption
from triptych.core.http.body import parse_json
from triptych.core.http.errors import to_public
from triptych.core.http.fields import Label, Strict
from triptych.core.http.validation import invalid_body
from triptych.core.limits import MAX_METADATA_VALUE_CHARS
from triptych.core.process.typed import decode_json
from triptych.core.text.json_lines import escape_line_ends

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses"
]


Line = tuple[int, bytes | None]
"""A line number, from 1, and the line; `None` for a line that is too long."""


class LineSplitter:
    """Splits a file that arrives in pieces into lines, without empty ones.

    Lines over `max_bytes` become `None`. A piece with many short lines takes a while.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._number = 0

    def push(self, piece: bytes) -> list[Line]:
        """Return the lines that end in this piece."""
        *ended, rest = piece.split(b"\n")
        found: list[Line] = []
        for part in ended:
            self._number += 1
            if part or self._rest:
                self._take(part)
                found += self._line()
        self._take(rest)
        return found

    def finish(self) -> list[Line]:
        """Return the last line if no line break ends it."""
        self._number += 1
        return self._line()

    def _take(self, part: bytes) -> None:
        """Keep at most one byte over the limit, to detect lines that are too long."""
        self._rest += part[: self._max_bytes + 1 - len(self._rest)]

    def _line(self) -> list[Line]:
        line = bytes(self._rest)
        self._rest.clear()
        if len(line) > self._max_bytes:
            return [(self._number, None)]
        line = line.strip()
        return [(self._number, line)] if line else []


class BatchLine(Strict):
    """One request of a batch."""

    custom_id: Annotated[Label, StringConstraints(min_length=1)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineRequest:
    """The request of a line as a JSON body, or the `error` that refuses it."""

    custom_id: str | None
    body: bytes = b""
    error: TriptychError | None = None


def read_line(line: bytes | None, endpoint: Endpoint) -> LineRequest:
    """Parse a line of a batch for `endpoint`."""
    custom_id = None
    try:
        if line is None:
            raise PayloadTooLarge("The line exceeds the size limit of a request.")
        given = parse_json(line)
        custom_id = _custom_id(given)
        found = BatchLine.model_validate(given)
        return LineRequest(custom_id, _body(found, endpoint))
    except ValidationError as error:
        return LineRequest(custom_id, error=to_public(invalid_body(BatchLine, error)))
    except TriptychError as error:
        return LineRequest(custom_id, error=error)


def _custom_id(given: Any) -> str | None:
    found = given.get("custom_id") if isinstance(given, dict) else None
    return found if isinstance(found, str) and len(found) <= MAX_METADATA_VALUE_CHARS else None


def _body(line: BatchLine, endpoint: Endpoint) -> bytes:
    """Return the body to post."""
    if line.url != endpoint:
        raise InvalidRequest(f"The batch is for {endpoint}; set url to it.", param="url")
    for name in ("stream", "background"):
        if line.body.get(name):
            raise UnsupportedOption(f"{name} is not offered in a batch: leave it out.", param=name)
    return json.dumps(line.body, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to the request of a line."""

    status: int
    body: bytes
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether the status is a success."""
        return 200 <= self.status < 300

    @property
    def retry_after_s(self) -> float | None:
        """The time to wait before a retry, if a retry can succeed."""
        after = self.headers.get("retry-after", "")
        return float(after) if self.status in (429, 503) and after.isdecimal() else None


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a line in the output or error file. Its `id` ends with the line's number."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, Any] | None


def answer_result(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """Return the result of an answered line, as JSON."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body or b"null"),
    }
    return _written(LineResult(id=line_id, custom_id=custom_id, response=response, error=None))


def error_result(line_id: str, custom_id: str | None, error: TriptychError) -> bytes:
    """Return the result of a line that was not posted, as JSON."""
    about = {"code": error.code, "message": error.message, "param": error.param}
    return _written(LineResult(id=line_id, custom_id=custom_id, response=None, error=about))


class _ResultId(msgspec.Struct, frozen=True):
    """The id of a stored `LineResult`."""

    id: str


def result_numbers(results: Sequence[bytes | None]) -> set[int]:
    """Return the line numbers of these results."""
    ids = (decode_json(result or b"", _ResultId).id for result in results)
    return {int(each.rpartition("_")[2]) for each in ids}


def _written(result: LineResult) -> bytes:
    return escape_line_ends(msgspec.json.encode(result)) + b"\n"
