"""The files of callers as documents of the store.

Owns the metadata of a file and its access control: only the owner's API key can read it. Knows no
route.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Literal

import msgspec

from triptych.core.errors import InvalidRequest, NotFound, UnsupportedOption
from triptych.core.process.typed import decode_json
from triptych.core.store.documents import Document, DocumentTable, Key, Page
from triptych.core.store.store import DocumentStore

Purpose = Literal["assistants", "batch", "batch_output", "evals", "user_data", "vision"]
_KIND = "file"
_GROWING = "growing"
"""Status of a file that is still being written and not listed."""
_LISTED_TOGETHER = 256


class FileAbout(msgspec.Struct, frozen=True):
    """The name and purpose of a file."""

    filename: str
    purpose: Purpose


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file; times are since the epoch."""

    id: str
    about: FileAbout
    num_bytes: int
    created_s: float
    expires_s: float = math.inf


class UserFiles:
    """The files in a store; without a store there are none."""

    def __init__(self, store: DocumentStore | None) -> None:
        self._store = store

    @property
    def store(self) -> DocumentStore:
        """The store. Raises `UnsupportedOption` with --store off."""
        if self._store is None:
            raise UnsupportedOption("Nothing is kept here: the server runs with --store off.")
        return self._store

    @property
    def is_there(self) -> bool:
        """Whether the server has a store."""
        return self._store is not None

    def check(self) -> None:
        """Raise `UnsupportedOption` if the server has no store."""
        _ = self.store

    async def add(
        self,
        owner: str,
        about: FileAbout,
        data: bytes | bytearray = b"",
        *,
        expires_s: float = math.inf,
        is_growing: bool = False,
    ) -> StoredFile:
        """Store a file; one that `is_growing` is hidden until `finish`. Raises `StoreFull`."""
        key = Key(_KIND, f"file-{secrets.token_hex(16)}", owner)
        document = Document(
            key=key,
            body=msgspec.json.encode(about),
            status=_GROWING if is_growing else "",
            is_lasting=True,
            created_s=time.time(),
            expires_s=expires_s,
        )
        await self.store.call(_keep, document, data)
        return _file(document, len(data))

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Return the file. Raises `NotFound`."""
        found = await self.store.call(DocumentTable.get, Key(_KIND, file_id, owner))
        if found is None or found.status == _GROWING:
            raise _missing(file_id)
        return _file(found, found.content_bytes)

    async def delete(self, owner: str, file_id: str) -> None:
        """Delete the file. Raises `NotFound`."""
        await self.get(owner, file_id)
        await self.store.call(DocumentTable.delete, Key(_KIND, file_id, owner))

    async def listed(
        self, owner: str, page: Page, purpose: Purpose | None = None
    ) -> list[StoredFile]:
        """Return a page of files in order of creation, optionally of one purpose.

        Raises `InvalidRequest` if `page.after` is not one of them.
        """
        files: list[StoredFile] = []
        part = replace(page, limit=_LISTED_TOGETHER)
        is_last = False
        while len(files) < page.limit and not is_last:  # in parts, so that other calls can run
            try:
                found, is_last, part = await self.store.call(_part, owner, part, purpose)
            except InvalidRequest:
                if part.after == page.after:
                    raise
                return await self.listed(owner, page, purpose)  # its last was deleted meanwhile
            files += found
        return files[: page.limit]

    def content(self, owner: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file in pieces; ends early if the file is deleted."""
        return self.store.content(Key(_KIND, file_id, owner))


def grow(table: DocumentTable, owner: str, file_id: str, data: bytes) -> bool:
    """Append to a growing file within a transaction; returns whether the file exists."""
    return table.append(Key(_KIND, file_id, owner), data)


def finish(table: DocumentTable, owner: str, file_id: str) -> bool:
    """Publish a growing file within a transaction; an empty file is deleted."""
    key = Key(_KIND, file_id, owner)
    found = table.get(key)
    if found is None:
        return False
    if not found.content_bytes:
        table.delete(key)
        return False
    return table.replace(key, found.body)


def _keep(table: DocumentTable, document: Document, data: bytes | bytearray) -> None:
    table.add(document)
    table.append(document.key, data)


def _part(
    table: DocumentTable, owner: str, page: Page, purpose: Purpose | None
) -> tuple[list[StoredFile], bool, Page]:
    """Return the visible files of a page, whether it is the last, and the next page."""
    found = table.list_page(owner, _KIND, page)
    shown = (each for each in found if each.status != _GROWING)
    files = [_file(each, each.content_bytes) for each in shown]
    if purpose is not None:
        files = [file for file in files if file.about.purpose == purpose]
    if len(found) < page.limit:
        return files, True, page
    return files, False, replace(page, after=found[-1].key.id)


def _file(document: Document, num_bytes: int) -> StoredFile:
    return StoredFile(
        id=document.key.id,
        about=decode_json(document.body, FileAbout),
        num_bytes=num_bytes,
        created_s=document.created_s,
        expires_s=math.inf if document.expires_s is None else document.expires_s,
    )


def _missing(file_id: str) -> NotFound:
    return NotFound(
        f"You have no file {file_id[:80]!a}; GET /v1/files lists yours.", param="file_id"
    )
