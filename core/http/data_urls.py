"""Files in a JSON body: what its data URLs hold is taken out of it while it arrives.

Owns the reading of a body with files of megabytes in it, as base64 behind `"url": "data:...`. They
are decoded piece by piece as they come, so that neither the JSON parser nor a decoder ever holds up
the event loop; in their place is left a word that no client can know. What a file means, and which
URLs a route takes, is the route's business.
"""

from __future__ import annotations

import asyncio
import binascii
import re
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from triptych.core.errors import InvalidRequest
from triptych.core.http.body import StrictRoute, body_too_large, receive_body
from triptych.core.http.upload import UploadBudget, UploadShare
from triptych.core.limits import MAX_CONTENT_PARTS
from triptych.core.media.fetch import Fetched, data_media_type

# In JSON these bytes are nothing but a field `url` and its value: within a string, quotes are
# escaped. Other spellings of the same are read, too, but as part of the JSON.
_OPENING: Final = re.compile(rb'"url"\s{0,8}:\s{0,8}"data:(?:[\w.+;=-]|\\?/){0,100}?;base64,')
_MAX_OPENING_BYTES: Final = 256
_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/=]++|\\/)*+")


class DataUrls:
    """The files of one body. They count as uploads of `budget` until this is closed.

    The reader closes it, or else the route: servers keep a request's state until its
    connection is collected, which may be long after both have ended.
    """

    def __init__(self, budget: UploadBudget, *, max_json_bytes: int) -> None:
        self._share = UploadShare(budget, self)
        self._max_json_bytes = max_json_bytes
        self._secret = secrets.token_hex(16)
        self._json = bytearray()
        self._rest = b""
        self._file: _Base64 | None = None
        self._files: dict[str, bytearray] = {}

    def take(self, piece: bytes) -> None:
        """Read the next bytes of the body.

        Raises `InvalidRequest` for what is no base64, `PayloadTooLarge` where too much is left,
        `Overloaded` where uploads hold too much memory.
        """
        self._share.take(len(piece))
        self._rest += piece
        while self._step():
            pass
        if len(self._json) > self._max_json_bytes:
            raise body_too_large(self._max_json_bytes)

    def finish(self) -> bytes:
        """The JSON that is left, once all bytes were taken."""
        whole = bytes(self._json + self._rest)
        self._json, self._rest, self._file = bytearray(), b"", None
        if len(whole) > self._max_json_bytes:
            raise body_too_large(self._max_json_bytes)
        return whole

    def close(self) -> None:
        """Release the files."""
        self._files.clear()
        self._share.close()

    def find(self, url: str) -> Fetched | None:
        """The file that stood in a URL of the parsed body, if it was taken out."""
        head, _, word = url.rpartition(",")
        data = self._files.get(word)
        return None if data is None else Fetched(data, data_media_type(head))

    def _step(self) -> bool:
        """Move on as far as can be; whether there may be more to do."""
        if self._file is not None:
            return self._read(self._file)
        opening = _OPENING.search(self._rest)
        kept = opening.end() if opening else max(0, len(self._rest) - _MAX_OPENING_BYTES)
        self._json += self._rest[:kept]
        self._rest = self._rest[kept:]
        if opening:
            self._open()
        return opening is not None

    def _open(self) -> None:
        if len(self._files) == MAX_CONTENT_PARTS:
            raise InvalidRequest(f"The body has over {MAX_CONTENT_PARTS} data URLs.")
        word = f"{self._secret}.{len(self._files)}"
        self._json += word.encode()
        self._files[word] = bytearray()
        self._file = _Base64(self._files[word])

    def _read(self, file: _Base64) -> bool:
        found = _BASE64.match(self._rest)
        end = found.end() if found else 0
        file.take(self._rest[:end])
        self._rest = self._rest[end:]
        if self._rest in (b"", b"\\"):
            return False
        file.finish()
        self._file = None
        return True


class DataUrlRoute(StrictRoute):
    """A route whose JSON body may hold files; its handler finds them with `data_urls`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turn = asyncio.Lock()

    async def read(self, request: Request) -> bytes:
        """The body without its files."""
        options = request.app.state.options
        urls = DataUrls(request.app.state.upload_budget, max_json_bytes=options.max_request_bytes)
        request.state.data_urls = urls
        taking_turns = Request(request.scope, partial(_receive, self._turn, request.receive))
        await receive_body(taking_turns, urls.take, options.max_picture_request_bytes)
        return urls.finish()

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler: the files are released with its end, if not before."""
        handler = super().get_route_handler()

        async def closing(request: Request) -> Response:
            try:
                return await handler(request)
            finally:
                if hasattr(request.state, "data_urls"):
                    data_urls(request).close()

        return closing


async def _receive(turn: asyncio.Lock, receive: Receive) -> Message:
    """The next piece of one body: each turn of the event loop is for one piece of one body."""
    async with turn:
        await asyncio.sleep(0)
    return await receive()


def data_urls(request: Request) -> DataUrls:
    """The files of a request to a `DataUrlRoute`."""
    urls: DataUrls = request.state.data_urls
    return urls


class _Base64:
    """Decodes text that comes in pieces, to the end of `data`."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._carry = b""

    def take(self, text: bytes) -> None:
        if not text:
            return
        text = self._carry + text.replace(b"\\/", b"/")
        whole = (len(text) - 1) // 4 * 4  # the last four characters may be padded: they wait
        self._carry = text[whole:]
        if b"=" in text[:whole]:
            raise _no_base64()
        self._decode(text[:whole])

    def finish(self) -> None:
        self._decode(self._carry)

    def _decode(self, text: bytes) -> None:
        try:
            self._data += binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error as error:
            raise _no_base64() from error


def _no_base64() -> InvalidRequest:
    return InvalidRequest("A data URL does not hold base64.", param="url")
