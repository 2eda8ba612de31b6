"""The routes `/v1/files`, compatible with OpenAI's.

Owns the form of an upload and the format of responses. `user_files` stores the files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from triptych.core import limits
from triptych.core.errors import InvalidRequest, UnsupportedOption
from triptych.core.http.byte_stream import ByteStream
from triptych.core.http.context import Context
from triptych.core.http.errors import ERROR_RESPONSES
from triptych.core.http.fields import Strict
from triptych.core.http.files.user_files import FileAbout, Purpose, StoredFile, UserFiles
from triptych.core.http.upload import form_body, read_form
from triptych.core.limits import MAX_NAME_CHARS
from triptych.core.store.documents import Page

_ROUTE = "/v1/files"
_FileId = Annotated[str, Path(min_length=1, max_length=MAX_NAME_CHARS)]


class FileForm(Strict):
    """The fields of an upload, without the file."""

    purpose: Literal["assistants", "batch", "evals", "user_data", "vision"]
    anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    seconds: int | None = Field(
        default=None,
        alias="expires_after[seconds]",
        ge=limits.MIN_FILE_LIFETIME_S,
        le=limits.MAX_FILE_LIFETIME_S,
        description="When to delete the file, in seconds from now. Default: never.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_tuning(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("purpose") == "fine-tune":
            raise UnsupportedOption("Fine-tuning is not offered.", param="purpose")
        return value

    @model_validator(mode="after")
    def _check_expiry(self) -> Self:
        if (self.anchor is None) != (self.seconds is None):
            raise InvalidRequest("expires_after needs anchor and seconds.", param="expires_after")
        return self


class FileReply(BaseModel):
    """A file without its bytes."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> Self:
        """Build the response for `file`."""
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=int(file.created_s),
            expires_at=None if math.isinf(file.expires_s) else int(file.expires_s),
            filename=file.about.filename,
            purpose=file.about.purpose,
        )


class FileList(BaseModel):
    """A page of a caller's files."""

    object: Literal["list"] = "list"
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The response to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def files_router(user_files: UserFiles) -> APIRouter:
    """Create the routes of files."""
    router = APIRouter(responses=ERROR_RESPONSES, tags=["files"])
    _add_collection(router, user_files)
    _add_one(router, user_files)
    return router


def _add_collection(router: APIRouter, user_files: UserFiles) -> None:
    @router.post(_ROUTE, openapi_extra=form_body(FileForm, "file"))
    async def upload_file(request: Request) -> FileReply:
        """Store a file."""
        user_files.check()
        form = await read_form(request)
        wanted, upload = form.parsed(FileForm), form.file("file")
        about = FileAbout(_printable(upload.filename) or "file", wanted.purpose)
        expires_s = math.inf if wanted.seconds is None else time.time() + wanted.seconds
        owner = Context.of(request).principal.owner
        return FileReply.of(await user_files.add(owner, about, upload.data, expires_s=expires_s))

    @router.get(_ROUTE)
    async def list_files(
        request: Request,
        purpose: Purpose | None = None,
        limit: Annotated[int, Query(ge=1, le=limits.MAX_FILES_LISTED)] = limits.MAX_FILES_LISTED,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str, Query(max_length=MAX_NAME_CHARS)] = "",
    ) -> FileList:
        """List the caller's files, the latest first."""
        page = Page(limit=limit + 1, after=after, is_descending=order == "desc")
        files = await user_files.listed(Context.of(request).principal.owner, page, purpose)
        data = [FileReply.of(file) for file in files[:limit]]
        return FileList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(files) > limit,
        )


def _add_one(router: APIRouter, user_files: UserFiles) -> None:
    @router.get(_ROUTE + "/{file_id}")
    async def show_file(file_id: _FileId, request: Request) -> FileReply:
        """Show one file."""
        return FileReply.of(await user_files.get(Context.of(request).principal.owner, file_id))

    @router.get(
        _ROUTE + "/{file_id}/content",
        response_model=None,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def file_content(file_id: _FileId, request: Request) -> Response:
        """Send the bytes of a file."""
        owner = Context.of(request).principal.owner
        file = await user_files.get(owner, file_id)

        async def describe() -> Mapping[str, str]:
            return {
                "content-length": str(file.num_bytes),
                "content-disposition": "attachment",
                "x-content-type-options": "nosniff",
            }

        content = user_files.content(owner, file_id)
        return ByteStream(content, media_type="application/octet-stream", describe=describe)

    @router.delete(_ROUTE + "/{file_id}")
    async def delete_file(file_id: _FileId, request: Request) -> FileDeleted:
        """Delete a file."""
        await user_files.delete(Context.of(request).principal.owner, file_id)
        return FileDeleted(id=file_id)


def _printable(filename: str) -> str:
    """Return the printable base name of a client's file name, which is never used as a path."""
    name = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:MAX_NAME_CHARS]
