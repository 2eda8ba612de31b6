"""Reads forms with files, `multipart/form-data`, as they arrive.

Owns the limits of a form: parts, fields, headers and total size. A file's name and type from the
client are kept as data and never trusted. Knows no fields, which belong to the route's pydantic
model, and no file format, which a decode child reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from triptych.core.errors import InvalidRequest, Overloaded, PayloadTooLarge, UnsupportedMedia
from triptych.core.http.body import check_not_compressed, observe_body, receive_body
from triptych.core.http.models import with_model
from triptych.core.http.validation import invalid_body
from triptych.core.limits import (
    MAX_FORM_FIELD_BYTES,
    MAX_FORM_PARTS,
    MAX_NAME_CHARS,
    MAX_PART_HEADER_BYTES,
    MAX_PART_HEADERS,
)

BINARY: Mapping[str, str] = MappingProxyType({"type": "string", "format": "binary"})
"""OpenAPI schema of a file."""

_MAX_BOUNDARY_CHARS = 70  # RFC 2046
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Upload:
    """A file of a form: its bytes, and its name and type from the client."""

    filename: str
    data: bytearray
    media_type: str = ""


class UploadBudget:
    """The memory in bytes that all forms together use and may use in this process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0


class UploadShare:
    """The share of one `holder` in the upload budget, until `close` or its garbage collection."""

    def __init__(self, budget: UploadBudget, holder: object) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.close = weakref.finalize(holder, self._give_back)

    def take(self, num_bytes: int) -> None:
        """Take `num_bytes` more. Raises `Overloaded` if the budget is exhausted."""
        if self._budget.num_bytes + num_bytes > self._budget.max_bytes:
            raise Overloaded("Too many uploads are in progress; try again.", retry_after_s=5)
        self._budget.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _give_back(self) -> None:
        self._budget.num_bytes -= self._num_bytes


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Form:
    """Fields and files of a form. Only fields named `x[]` or `x[][y]` may be repeated: lists."""

    fields: dict[str, str | list[str]] = field(default_factory=dict)
    files: dict[str, list[Upload]] = field(default_factory=dict)

    def file(self, *names: str) -> Upload:
        """Return the form's only file, under one of `names`. Raises `InvalidRequest`."""
        first, *others = self.uploads(*names)
        if others:
            msg = f"Send one file as {names[0]}, not {len(others) + 1}."
            raise InvalidRequest(msg, param=names[0])
        return first

    def uploads(self, *names: str, optional: Sequence[str] = ()) -> list[Upload]:
        """Return the files under `names`, at least one. Other files may be under `optional` only.

        Raises `InvalidRequest`.
        """
        for name in self.files:
            if name not in (*names, *optional):
                msg = f"Unexpected file field {_shown(name)}: send the file as {names[0]}."
                raise InvalidRequest(msg, param=names[0])
        found = [upload for name in names for upload in self.files.get(name, ())]
        if not found:
            raise InvalidRequest(f"{names[0]} is required, as a file.", param=names[0])
        return found

    def parsed(self, model: type[_Model]) -> _Model:
        """Validate the fields with `model`, which may parse numbers and booleans from text.

        Raises FastAPI's `RequestValidationError`.
        """
        try:
            return model.model_validate(self.fields, strict=False)
        except ValidationError as error:
            raise invalid_body(model, error) from error


def parsed_form(request: Request, form: Form, kind: type[_Model]) -> _Model:
    """Validate the fields of a form with `kind`, after `with_model`. Raises as both do."""
    named = replace(form, fields=with_model(request, kind, form.fields))
    observe_body(request, msgspec.json.encode(named.fields), named.fields)
    return named.parsed(kind)


async def read_form(request: Request) -> Form:
    """Read the request's form.

    Raises `UnsupportedMedia` for another content type, `PayloadTooLarge` over `max_upload_bytes` or
    another limit, `InvalidRequest` for a malformed form, `RequestTimeout` if it is late,
    `Overloaded` if other forms hold too much memory. Keep the form while its file is in use.
    """
    state = request.app.state
    reader = _FormReader(_boundary(request), state.upload_budget)
    await receive_body(request, reader.take, state.options.max_upload_bytes)
    return reader.finish()


def form_body(
    model: type[BaseModel], file: str, others: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the `openapi_extra` of a form with `model`'s fields and `file`.

    `others` are schemas of further files by name. Another route must add the models that `model`
    refers to.
    """
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema["properties"] |= {file: dict(BINARY), **others}
    schema["required"] = [*schema.get("required", []), file]
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


class _FormReader:
    """A form under construction."""

    def __init__(self, boundary: str, budget: UploadBudget) -> None:
        self._form = Form()
        self._share = UploadShare(budget, self._form)
        self._name = ""
        self._is_file = False
        self._part = bytearray()
        self._parser = PushMultipartParser(
            boundary,
            max_header_size=MAX_PART_HEADER_BYTES,
            max_header_count=MAX_PART_HEADERS,
            max_segment_count=MAX_FORM_PARTS,
        )

    def take(self, piece: bytes) -> None:
        """Read the next bytes."""
        if piece:
            self._share.take(len(piece))
            self._follow(self._parser.parse(piece))

    def finish(self) -> Form:
        """The form, once all its bytes were taken."""
        self._follow(self._parser.parse(b""))
        return self._form

    def _follow(self, events: Iterable[MultipartSegment | bytes | None]) -> None:
        try:
            for event in events:
                if isinstance(event, MultipartSegment):
                    self._begin(event)
                elif event is None:
                    self._end()
                else:
                    self._extend(event)
        except ParserLimitReached as error:
            raise PayloadTooLarge(f"The form is over a limit: {error.args[0]}.") from error
        except MultipartError as error:
            raise InvalidRequest(f"The form is malformed: {error.args[0]}.") from error

    def _begin(self, segment: MultipartSegment) -> None:
        name = segment.name or ""
        if not 0 < len(name) <= MAX_NAME_CHARS:
            raise InvalidRequest("A part of the form has no name, or one that is too long.")
        self._name, self._is_file = name, segment.filename is not None
        self._part = bytearray()
        files: Mapping[str, object] = self._form.files
        fields: Mapping[str, object] = self._form.fields
        same, other = (files, fields) if self._is_file else (fields, files)
        if name in other or (name in same and "[]" not in name):
            raise InvalidRequest(f"Duplicate field {_shown(name)}.", param=_shown(name))
        if self._is_file:
            upload = Upload(segment.filename or "", self._part, segment.content_type or "")
            self._form.files.setdefault(name, []).append(upload)

    def _extend(self, piece: bytes) -> None:
        self._part += piece
        if not self._is_file and len(self._part) > MAX_FORM_FIELD_BYTES:
            msg = f"A field of the form is over {MAX_FORM_FIELD_BYTES} bytes."
            raise PayloadTooLarge(msg, param=_shown(self._name))

    def _end(self) -> None:
        if self._is_file:
            return
        try:
            text = self._part.decode("utf-8")
        except UnicodeDecodeError as error:
            msg = f"{_shown(self._name)} is not UTF-8 text."
            raise InvalidRequest(msg, param=_shown(self._name)) from error
        if "[]" in self._name:
            values = self._form.fields.setdefault(self._name, [])
            assert isinstance(values, list)  # `_begin` lets nothing else by
            values.append(text)
        else:
            self._form.fields[self._name] = text


def _boundary(request: Request) -> str:
    check_not_compressed(request)
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary: str = options.get("boundary", "")
    if kind != "multipart/form-data":
        raise UnsupportedMedia("Send a form with the file in it, as 'multipart/form-data'.")
    if not (0 < len(boundary) <= _MAX_BOUNDARY_CHARS and boundary.isascii()):
        raise InvalidRequest("The form's boundary is missing or malformed.")
    return boundary


def _shown(name: str) -> str:
    """A client's word, fit to be repeated to it."""
    return ascii(name[:80])[1:-1]
