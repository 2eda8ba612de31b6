"""Extracts the files of data URLs from a JSON body while it arrives.

Owns the reading of bodies with large base64 files, behind `"url": "data:...` or wherever else an
API has them. Files are decoded piece by piece, so that neither the JSON parser nor a decoder blocks
the event loop. Each is replaced by a placeholder that no client can guess. Outside of fields for
images, the text is restored. Knows neither the content of a file nor the URLs a route accepts.
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
from triptych.core.media.fetch import Fetched, data_media_type, plain_base64

_MAX_OPENING_BYTES: Final = 256
_STRETCH_BYTES: Final = 3 * 2**18
_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/= ]++|\\[/nrt]|%(?:2[BbFf0]|3[Dd]|0[AaDd9]))*+")
"""Base64 in a JSON string: with the white space of MIME lines, and percent-encoded as in URLs."""
_BEGUN: Final = re.compile(rb"(?:\\|%[023]?)?")
"""An escape sequence that may be cut at the end of a piece."""
_ESCAPES: Final = ((b"\\/", b"/"), (b"\\n", b"\n"), (b"\\r", b"\r"), (b"\\t", b"\t"))


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The places of files in a JSON body: behind `opening`, and behind `following` each of them.

    Both match at most 256 bytes, which cannot occur inside a JSON string, where quotes are escaped.
    Other spellings of the same JSON are also read, but as part of the JSON. A text is not extracted
    unless its first `least` characters are all base64. `images` are the paths of the fields that
    take files; in any other field they are text. `field` is the name in errors.
    """

    opening: re.Pattern[bytes]
    images: frozenset[tuple[str, ...]]
    field: str
    following: re.Pattern[bytes] | None = None
    least: int = 0


IN_DATA_URLS: Final = FilePlace(
    re.compile(
        rb'"(?:url"\s{0,8}:\s{0,8}"data:(?:[\w.+;=-]|\\?/){0,100}?;base64,|data"\s{0,8}:\s{0,8}")'
    ),
    images=frozenset(
        {
            ("messages", "content", "image_url", "url"),
            ("messages", "content", "input_audio", "data"),
            ("messages", "audio", "data"),
        }
    ),
    field="url",
)
"""Images and recordings in messages of chat, and the sound of answers that clients send back."""


class DataUrls:
    """The files of one body. They count as uploads of `budget` until `close`.

    The reader or else the route closes it: servers keep a request's state until its connection is
    garbage-collected, possibly long after both have ended.
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
        self._at = 0  # position in `_rest` up to which it is read
        self._num_openings = 0
        self._file = _File()
        self._files: dict[str, _File] = {}

    @property
    def num_bytes(self) -> int:
        """The total size of the files."""
        return sum(len(file.data) for file in self._files.values())

    def take(self, piece: bytes) -> None:
        """Read the next bytes of the body.

        Raises `InvalidRequest` for too many files, `PayloadTooLarge` if the remaining JSON is too
        large, `Overloaded` if uploads hold too much memory.
        """
        self._share.take(len(piece))
        self._rest += piece
        while self._step():
            pass
        self._rest, self._at = self._rest[self._at :], 0
        if len(self._json) > self._max_json_bytes:
            raise body_too_large(self._max_json_bytes)

    def finish(self) -> bytes:
        """Return the remaining JSON after the last byte."""
        whole = bytes(self._json + self._rest)
        self._json, self._rest = bytearray(), b""
        if len(whole) > self._max_json_bytes:
            raise body_too_large(self._max_json_bytes)
        return whole

    def close(self) -> None:
        """Release the files."""
        self._files.clear()
        self._share.close()

    def find(self, url: str) -> Fetched | None:
        """Return the file that was extracted from this URL of the parsed body, if any.

        Raises `InvalidRequest` for invalid base64.
        """
        head, _, word = url.rpartition(",")
        file = self._files.get(word)
        if file is None:
            return None
        if not file.is_base64:
            raise InvalidRequest("A file is not valid base64.", param=self._place.field)
        return Fetched(file.data, data_media_type(head))

    def put_back(self, body: Any) -> Any:
        """Restore the text of files outside of image fields in the parsed body. Call it once."""
        if not self._files:
            return body
        whole = self._with_texts(body, ())
        for file in self._files.values():
            file.forget_text()
        return whole

    def _with_texts(self, value: Any, way: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {name: self._with_texts(part, (*way, name)) for name, part in value.items()}
        if isinstance(value, list):
            return [self._with_texts(part, way) for part in value]
        if isinstance(value, str) and self._secret in value and way not in self._place.images:
            word = re.compile(rf"{self._secret}\.\d+;")
            return word.sub(lambda found: self._files[found[0]].text(), value)
        return value

    def _step(self) -> bool:
        """Read as far as possible; returns whether more may follow."""
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
        opening = self._place.opening.search(self._rest, self._at)
        if opening:
            self._open(opening.end())
        else:
            self._keep(max(self._at, len(self._rest) - _MAX_OPENING_BYTES))
        return opening is not None

    def _keep(self, end: int) -> None:
        """Append the next bytes to the JSON."""
        self._json += self._rest[self._at : end]
        self._at = end

    def _open(self, end: int) -> None:
        """Continue after the opening of a file's place."""
        if self._num_openings == MAX_CONTENT_PARTS:
            raise InvalidRequest(
                f"The body has more than {MAX_CONTENT_PARTS} files.",
                param=self._place.field,
            )
        self._num_openings += 1
        self._keep(end)
        self._reading = "opened"

    def _decide(self) -> bool:
        """Decide whether the string is a file or other text."""
        end = self._base64_end()
        if end - self._at >= self._place.least:
            self._begin()
        elif self._is_cut(end):
            return False
        else:
            self._keep(end)
            self._reading = "closed"
        return True

    def _base64_end(self) -> int:
        found = _BASE64.match(self._rest, self._at)
        return found.end() if found else self._at

    def _is_cut(self, end: int) -> bool:
        """Whether base64 that ends there may continue in the next piece."""
        return _BEGUN.fullmatch(self._rest, end) is not None

    def _begin(self) -> None:
        # The semicolon distinguishes the placeholder from one that the client extended.
        word = f"{self._secret}.{len(self._files)};"
        self._json += word.encode()
        self._file = self._files[word] = _File()
        self._reading = "file"

    def _read(self) -> bool:
        end = self._base64_end()
        is_cut = self._is_cut(end)
        self._file.take(self._rest[self._at : end])
        self._at = end
        if not is_cut:
            self._file.finish()
            self._reading = "closed"
        return not is_cut

    def _follow(self) -> bool:
        """Check whether another file follows immediately."""
        following = self._place.following
        found = following.match(self._rest, self._at) if following else None
        if found:
            self._open(found.end())
        elif following and len(self._rest) - self._at < _MAX_OPENING_BYTES:
            return False
        else:
            self._reading = "json"
        return True


class DataUrlRoute(StrictRoute):
    """A route whose JSON body may hold files at `place`; `data_urls` returns them."""

    place: ClassVar[FilePlace] = IN_DATA_URLS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._turn = asyncio.Lock()

    async def read(self, request: Request) -> bytes:
        """Read the body without its files."""
        options = request.app.state.options
        urls = DataUrls(
            request.app.state.upload_budget,
            max_json_bytes=options.max_request_bytes,
            place=self.place,
        )
        request.state.data_urls = urls
        taking_turns = Request(request.scope, partial(_receive, self._turn, request.receive))
        await receive_body(taking_turns, urls.take, options.max_image_request_bytes)
        return urls.finish()

    def num_bytes(self, request: Request, raw: bytes) -> int:
        """Return the bytes to parse, including files that may be restored as text."""
        return len(raw) + data_urls(request).num_bytes

    def parse(self, request: Request, raw: bytes) -> Any:
        """Parse the body; files in fields other than images are restored as text."""
        return data_urls(request).put_back(super().parse(request, raw))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler: the files are released when it ends."""
        handler = super().get_route_handler()

        async def closing(request: Request) -> Response:
            try:
                return await handler(request)
            finally:
                if hasattr(request.state, "data_urls"):
                    data_urls(request).close()

        return closing


async def _receive(turn: asyncio.Lock, receive: Receive) -> Message:
    """Receive the next piece; the event loop reads one piece of one body per turn."""
    async with turn:
        await asyncio.sleep(0)
    return await receive()


def data_urls(request: Request) -> DataUrls:
    """Return the files of a request to a `DataUrlRoute`."""
    urls: DataUrls = request.state.data_urls
    return urls


class _File:
    """A file whose base64 arrives in pieces: its `data`, and its text if it is not a file."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_base64 = True
        self._num_exact = 0
        self._last = bytearray()  # characters that may not be canonical base64 of the data
        self._said: bytearray | None = None  # all characters, if some are not base64

    def take(self, text: bytes) -> None:
        """Decode the next piece."""
        for escape, char in _ESCAPES:
            text = text.replace(escape, char)
        plain = plain_base64(text)
        if self._said is None and len(plain) < len(text):
            self._num_exact = len(self.data)
            self._said = bytearray(self._written())
        if self._said is not None:
            self._said += text
        self._last += plain
        whole = max(0, len(self._last) - 1) // 4 * 4  # the last four may be padded: they wait
        if self.is_base64 and b"=" in self._last[:whole]:
            self.is_base64 = False
        if self.is_base64:
            self.data += binascii.a2b_base64(self._last[:whole], strict_mode=True)
            del self._last[:whole]

    def finish(self) -> None:
        """Decode the last characters."""
        self._num_exact = len(self.data)
        try:
            self.data += binascii.a2b_base64(self._last, strict_mode=True)
        except binascii.Error:
            self.is_base64 = False

    def text(self) -> str:
        """Return the text as it was sent."""
        return (self._written() if self._said is None else self._said).decode()

    def forget_text(self) -> None:
        """Keep only the data."""
        self._said = None

    def _written(self) -> bytes:
        """Encode the data as base64, in stretches between which other threads can run."""
        starts = range(0, self._num_exact, _STRETCH_BYTES)
        ends = (min(start + _STRETCH_BYTES, self._num_exact) for start in starts)
        pieces = (base64.b64encode(self.data[a:b]) for a, b in zip(starts, ends, strict=True))
        return b"".join([*pieces, self._last])
