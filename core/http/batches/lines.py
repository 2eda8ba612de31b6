"""The lines of a batch: how a file comes apart into them, and what each must be.

Owns the fields of a line and of what is written for it. A line that is wrong harms no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import StringConstraints, ValidationError

from triptych.core.errors import InvalidRequest, PayloadTooLarge, TriptychError, UnsupportedOption
from triptych.core.http.body import parse_json
from triptych.core.http.errors import to_public
from triptych.core.http.fields import Label, Strict
from triptych.core.limits import MAX_METADATA_VALUE_CHARS, MAX_PRIORITY
from triptych.core.process.typed import decode_json
from triptych.core.text.json_lines import escape_line_ends

Endpoint = Literal[
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses"
]
_WITH_PRIORITY: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


Line = tuple[int, bytes | None]
"""A line and its number, from 1; nothing is one that is too long."""


class LineSplitter:
    """Lines of a file that comes in pieces, less the empty ones; one of over `max_bytes` is `None`.

    A piece of short lines takes a while.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._number = 0

    def push(self, piece: bytes) -> list[Line]:
        """The lines that end in this piece."""
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
        """The last line, where no line break ends it."""
        self._number += 1
        return self._line()

    def _take(self, part: bytes) -> None:
        """Keep one byte more than a line may have: that shows that it is too long."""
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
    """What a line asks for, as it is to be posted, or the `error` for which it is not."""

    custom_id: str | None
    body: bytes = b""
    error: TriptychError | None = None


def read_line(line: bytes | None, endpoint: Endpoint) -> LineRequest:
    """The request in a line of a batch for `endpoint`."""
    custom_id = None
    try:
        if line is None:
            raise PayloadTooLarge("The line is longer than a request may be.")
        given = parse_json(line)
        custom_id = _custom_id(given)
        found = BatchLine.model_validate(given)
        return LineRequest(custom_id, _body(found, endpoint))
    except ValidationError as error:
        entries = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        return LineRequest(custom_id, error=to_public(RequestValidationError(entries)))
    except TriptychError as error:
        return LineRequest(custom_id, error=error)


def _custom_id(given: Any) -> str | None:
    found = given.get("custom_id") if isinstance(given, dict) else None
    return found if isinstance(found, str) and len(found) <= MAX_METADATA_VALUE_CHARS else None


def _body(line: BatchLine, endpoint: Endpoint) -> bytes:
    """What is posted: behind all others, where requests can be put in order."""
    if line.url != endpoint:
        raise InvalidRequest(f"The batch is for {endpoint}; this line is not.", param="url")
    for name in ("stream", "background"):
        if line.body.get(name):
            raise UnsupportedOption(f"There is no {name} in a batch: leave it out.", param=name)
    behind = {"priority": MAX_PRIORITY} if endpoint in _WITH_PRIORITY else {}
    return json.dumps({**behind, **line.body}, ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """An answer to a request of a line."""

    status: int
    body: bytes
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether it is an answer, and no error."""
        return 200 <= self.status < 300

    @property
    def retry_after_s(self) -> float | None:
        """When to ask again, where there is nothing wrong but the moment."""
        after = self.headers.get("retry-after", "")
        return float(after) if self.status in (429, 503) and after.isdecimal() else None


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is written for a line, to the output or to the errors. `id` ends with its number."""

    id: str
    custom_id: str | None
    response: dict[str, Any] | None
    error: dict[str, Any] | None


def answered(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """What is written for a line that was answered."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body or b"null"),
    }
    return _written(LineResult(id=line_id, custom_id=custom_id, response=response, error=None))


def refused(line_id: str, custom_id: str | None, error: TriptychError) -> bytes:
    """What is written for a line that was not even asked."""
    about = {"code": error.code, "message": error.message, "param": error.param}
    return _written(LineResult(id=line_id, custom_id=custom_id, response=None, error=about))


class _ResultId(msgspec.Struct, frozen=True):
    """What has to be known of a `LineResult` that is kept."""

    id: str


def result_numbers(results: Sequence[bytes | None]) -> set[int]:
    """Of which lines these are results."""
    ids = (decode_json(result or b"", _ResultId).id for result in results)
    return {int(each.rpartition("_")[2]) for each in ids}


def _written(result: LineResult) -> bytes:
    return escape_line_ends(msgspec.json.encode(result)) + b"\n"
