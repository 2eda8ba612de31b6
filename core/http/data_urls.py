"""Files in a JSON body: what its data URLs hold is taken out of it while it arrives.

Owns the reading of a body with files of megabytes in it, as base64 behind `"url": "data:...`, or
wherever else an API has them. They are decoded piece by piece as they come, so that neither the
JSON parser nor a decoder ever holds up the event loop; in their place is left a word that no client
can know. Where no image is read, the text is put back. What a file means, and which URLs a route
takes, is the route's business.
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
"""In JSON: with white space, which MIME breaks lines with, and as URLs may write it."""
_BEGUN: Final = re.compile(rb"(?:\\|%[023]?)?")
"""What may be the beginning of more of it, at the end of a piece."""
_ESCAPES: Final = ((b"\\/", b"/"), (b"\\n", b"\n"), (b"\\r", b"\r"), (b"\\t", b"\t"))


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where in a JSON body files stand: behind `opening`, and behind `following` each of them.

    Both match at most 256 bytes, which in JSON are nothing else: within a string, quotes are
    escaped. Other spellings of the same are read, too, but as part of the JSON. A text stays
    there unless its first `least` characters are all base64. `images` are the names on the ways
    to where files are read; anywhere else they are text.
    """

    opening: re.Pattern[bytes]
    images: frozenset[tuple[str, ...]]
    following: re.Pattern[bytes] | None = None
    least: int = 0

    @property
    def field(self) -> str:
        """What a caller calls the place of an image."""
        return min(self.images)[-1]


IN_DATA_URLS: Final = FilePlace(
    re.compile(rb'"url"\s{0,8}:\s{0,8}"data:(?:[\w.+;=-]|\\?/){0,100}?;base64,'),
    images=frozenset({("messages", "content", "image_url", "url")}),
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
        self._at = 0  # so much of the rest is read
        self._num_openings = 0
        self._file = _File()
        self._files: dict[str, _File] = {}

    @property
    def num_bytes(self) -> int:
        """How large the files are."""
        return sum(len(file.data) for file in self._files.values())

    def take(self, piece: bytes) -> None:
        """Read the next bytes of the body.

        Raises `InvalidRequest` for too many files, `PayloadTooLarge` where too much is left,
        `Overloaded` where uploads hold too much memory.
        """
        self._share.take(len(piece))
        self._rest += piece
        while self._step():
            pass
        self._rest, self._at = self._rest[self._at :], 0
        if len(self._json) > self._max_json_bytes:
            raise body_too_large(self._max_json_bytes)

    def finish(self) -> bytes:
        """The JSON that is left, once all bytes were taken."""
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
        """The file that stood in a URL of the parsed body, if it was taken out.

        Raises `InvalidRequest` for what is no base64.
        """
        head, _, word = url.rpartition(",")
        file = self._files.get(word)
        if file is None:
            return None
        if not file.is_base64:
            raise InvalidRequest("An image is no base64.", param=self._place.field)
        return Fetched(file.data, data_media_type(head))

    def put_back(self, body: Any) -> Any:
        """The parsed body, with text as it was sent wherever no image is read. Once."""
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
        opening = self._place.opening.search(self._rest, self._at)
        if opening:
            self._open(opening.end())
        else:
            self._keep(max(self._at, len(self._rest) - _MAX_OPENING_BYTES))
        return opening is not None

    def _keep(self, end: int) -> None:
        """Leave the next bytes to the JSON."""
        self._json += self._rest[self._at : end]
        self._at = end

    def _open(self, end: int) -> None:
        """Go on behind what opens a file's place."""
        if self._num_openings == MAX_CONTENT_PARTS:
            raise InvalidRequest(
                f"The body has over {MAX_CONTENT_PARTS} places of images.",
                param=self._place.field,
            )
        self._num_openings += 1
        self._keep(end)
        self._reading = "opened"

    def _decide(self) -> bool:
        """Tell a file from other text."""
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
        """Whether base64 that ends there may go on with bytes that are yet to come."""
        return _BEGUN.fullmatch(self._rest, end) is not None

    def _begin(self) -> None:
        # The mark at its end tells the word from one that the client made longer.
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
        """See whether another file comes right behind."""
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
        await receive_body(taking_turns, urls.take, options.max_image_request_bytes)
        return urls.finish()

    def num_bytes(self, request: Request, raw: bytes) -> int:
        """As for every route; files may have to be text again."""
        return len(raw) + data_urls(request).num_bytes

    def parse(self, request: Request, raw: bytes) -> Any:
        """The parsed body, in which files are left where images are read."""
        return data_urls(request).put_back(super().parse(request, raw))

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


class _File:
    """A file whose base64 comes in pieces: its `data`, and the text where that is none."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_base64 = True
        self._num_exact = 0
        self._last = bytearray()  # characters that are not sure to be those of the data
        self._said: bytearray | None = None  # all characters, where some are not of the base64

    def take(self, text: bytes) -> None:
        """Decode more of it."""
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
        """All of it was taken."""
        self._num_exact = len(self.data)
        try:
            self.data += binascii.a2b_base64(self._last, strict_mode=True)
        except binascii.Error:
            self.is_base64 = False

    def text(self) -> str:
        """The text as it was sent."""
        return (self._written() if self._said is None else self._said).decode()

    def forget_text(self) -> None:
        """Keep the data alone."""
        self._said = None

    def _written(self) -> bytes:
        """The base64. Other threads run between its stretches."""
        starts = range(0, self._num_exact, _STRETCH_BYTES)
        ends = (min(start + _STRETCH_BYTES, self._num_exact) for start in starts)
        pieces = (base64.b64encode(self.data[a:b]) for a, b in zip(starts, ends, strict=True))
        return b"".join([*pieces, self._last])
