"""Files in a JSON body: what its data URLs hold is taken out of it while it arrives.

Owns the reading of a body with files of megabytes in it, as base64 behind `"url": "data:...`, or
wherever else an API has them. They are decoded piece by piece as they come, so that neither the
JSON parser nor a decoder ever holds up the event loop; in their place is left a word that no client
can know. What a file means, and which URLs a route takes, is the route's business.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from triptych.core.errors import InvalidRequest
from triptych.core.http.body import StrictRoute, body_too_large, receive_body
from triptych.core.http.upload import UploadBudget, UploadShare
from triptych.core.limits import MAX_CONTENT_PARTS
from triptych.core.media.fetch import Fetched, data_media_type

_MAX_OPENING_BYTES: Final = 256
_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/=]++|\\/)*+")


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where in a JSON body files stand: behind `opening`, and behind `following` each of them.

    Both match at most 256 bytes, which in JSON are nothing else: within a string, quotes are
    escaped. Other spellings of the same are read, too, but as part of the JSON. A text stays
    there unless its first `least` characters are all base64.
    """

    opening: re.Pattern[bytes]
    following: re.Pattern[bytes] | None = None
    least: int = 0


IN_DATA_URLS: Final = FilePlace(
    re.compile(rb'"url"\s{0,8}:\s{0,8}"data:(?:[\w.+;=-]|\\?/){0,100}?;base64,')
)


class DataUrls:
    """The files of one body. They count as uploads of `budget` until this is closed.

    The reader closes it, or else the route: servers keep a request's state until its
    connection is collected, which may be long after both have ended.
    """

    def __init__(
        self, budget: UploadBudget, *, max_json_bytes: int, place: FilePlace = IN_DATA_URLS
    ) -> None:
        self._share = UploadShare(budget, self)
        self._place = place
        self._reading: Literal["json", "opened", "file", "closed"] = "json"
        self._max_json_bytes = max_json_bytes
        self._secret = secrets.token_hex(16)
        self._json = bytearray()
        self._rest = b""
        self._file = _Base64(bytearray())
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
        self._json, self._rest, self._file = bytearray(), b"", _Base64(bytearray())
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

    def restore(self, text: str) -> str:
        """`text` with the files in it as they were sent."""
        encoded = {word: base64.b64encode(data).decode() for word, data in self._files.items()}
        pattern = rf"{self._secret}\.\d+"
        return re.sub(pattern, lambda found: encoded[found[0]], text)

    def _step(self) -> bool:
        """Move on as far as can be; whether there may be more to do."""
        match self._reading:
            case "json":
                return self._find()
            case "opened":
                return self._decide()
            case "file":
                return self._read()
            case "closed":
                return self._follow()

    def _find(self) -> bool:
        opening = self._place.opening.search(self._rest)
        self._keep(opening.end() if opening else max(0, len(self._rest) - _MAX_OPENING_BYTES))
        if opening:
            self._reading = "opened"
        return opening is not None

    def _keep(self, num_bytes: int) -> None:
        """Leave the next bytes to the JSON."""
        self._json += self._rest[:num_bytes]
        self._rest = self._rest[num_bytes:]

    def _decide(self) -> bool:
        """Tell a file from other text."""
        length = self._base64_length()
        if length >= self._place.least:
            self._open()
        elif self._is_cut(length):
            return False
        else:
            self._keep(length)
            self._reading = "closed"
        return True

    def _base64_length(self) -> int:
        found = _BASE64.match(self._rest)
        return found.end() if found else 0

    def _is_cut(self, length: int) -> bool:
        """Whether so much of base64 may go on with bytes that are yet to come."""
        return self._rest[length:] in (b"", b"\\")

    def _open(self) -> None:
        if len(self._files) == MAX_CONTENT_PARTS:
            raise InvalidRequest(f"The body has over {MAX_CONTENT_PARTS} data URLs.")
        word = f"{self._secret}.{len(self._files)}"
        self._json += word.encode()
        self._files[word] = bytearray()
        self._file = _Base64(self._files[word])
        self._reading = "file"

    def _read(self) -> bool:
        length = self._base64_length()
        is_cut = self._is_cut(length)
        self._file.take(self._rest[:length])
        self._rest = self._rest[length:]
        if not is_cut:
            self._file.finish()
            self._reading = "closed"
        return not is_cut

    def _follow(self) -> bool:
        """See whether another file comes right behind."""
        following = self._place.following
        found = following.match(self._rest) if following else None
        if following and not found and len(self._rest) < _MAX_OPENING_BYTES:
            return False
        self._keep(found.end() if found else 0)
        self._reading = "opened" if found else "json"
        return True


class DataUrlRoute(StrictRoute):
    """A route whose JSON body may hold files, at `place`; its handler finds them by `data_urls`."""

    place: ClassVar[FilePlace] = IN_DATA_URLS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turn = asyncio.Lock()

    async def read(self, request: Request) -> bytes:
        """The body without its files."""
        options = request.app.state.options
        urls = DataUrls(
            request.app.state.upload_budget,
            max_json_bytes=options.max_request_bytes,
            place=self.place,
        )
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
