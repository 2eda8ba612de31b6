"""Stored files that a request refers to by id.

Owns the limit of their size per request, which is that of a body, and counts them as uploads.
"""

from __future__ import annotations

from contextlib import aclosing

from starlette.requests import Request

from triptych.core.errors import PayloadTooLarge
from triptych.core.http.context import Context
from triptych.core.http.files.user_files import UserFiles
from triptych.core.http.upload import UploadShare
from triptych.core.media.fetch import Fetched


class StoredFiles:
    """The files that a request refers to. They count as uploads until `close`."""

    def __init__(self, request: Request) -> None:
        context, state = Context.of(request), request.app.state
        self._owner = context.principal.owner
        self._user_files: UserFiles = state.user_files
        self._max_bytes = context.options.max_image_request_bytes
        self._share = UploadShare(state.upload_budget, self)
        self._files: dict[str, bytearray] = {}

    async def read(self, name: str, file_id: str) -> None:
        """Read a file once and keep it under `name`.

        Raises `NotFound`, and `PayloadTooLarge` and `Overloaded` as for a body with the files.
        """
        if name in self._files:
            return
        file = await self._user_files.get(self._owner, file_id)
        held = sum(map(len, self._files.values()))
        if held + file.num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"The files of the request exceed {self._max_bytes} bytes.",
                param="messages",
            )
        self._share.take(file.num_bytes)
        data = bytearray()
        async with aclosing(self._user_files.content(self._owner, file_id)) as pieces:
            async for piece in pieces:
                data += piece
        self._files[name] = data

    def find(self, name: str) -> Fetched | None:
        """Return the file that was read for `name`."""
        data = self._files.get(name)
        return None if data is None else Fetched(data, "")

    def close(self) -> None:
        """Release the files."""
        self._files.clear()
        self._share.close()
