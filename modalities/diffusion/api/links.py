"""Images that are answered as links: where a link leads, and what a link of ours means.

Owns the spelling of links. What is kept, and for how long, is the store's business.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from triptych.core.errors import InvalidRequest
from triptych.core.http.context import Context
from triptych.core.media.fetch import Fetched
from triptych.modalities.diffusion.api.files import MEDIA_TYPES, ImageKind

ID_CHARS: Final = 43
_ID_BYTES: Final = 32  # of randomness: `ID_CHARS` in base64


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A file, and for how long it is still kept."""

    data: bytes
    kind: ImageKind
    owner: str
    expires_s: float


class ImageStore:
    """Files by ids that cannot be guessed, `max_bytes` of them, each for `ttl_s`.

    Where there is no room the oldest give way. One event loop uses it.
    """

    def __init__(
        self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self.num_bytes = 0
        self._clock = clock
        self._images: OrderedDict[str, StoredImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._images)

    def add(self, data: bytes, kind: ImageKind, owner: str) -> str:
        """Keep a file of `owner`; its id. Raises `InvalidRequest` for one that never fits."""
        if len(data) > self.max_bytes:
            raise InvalidRequest(
                "The image is too large to be kept for a link: ask for b64_json.",
                param="response_format",
            )
        now_s = self._clock()
        self._forget(now_s, len(data))
        image_id = secrets.token_urlsafe(_ID_BYTES)
        self._images[image_id] = StoredImage(data, kind, owner, now_s + self.ttl_s)
        self.num_bytes += len(data)
        return image_id

    def find(self, image_id: str, owner: str) -> StoredImage | None:
        """The file with that id; `None` where `owner` has none, or none any more."""
        self._forget(self._clock())
        image = self._images.get(image_id)
        return image if image is not None and image.owner == owner else None

    def _forget(self, now_s: float, num_new_bytes: int = 0) -> None:
        """Drop what is over its time, and the oldest as long as there is no room."""
        while self._images:
            oldest = next(iter(self._images.values()))
            has_room = self.num_bytes + num_new_bytes <= self.max_bytes
            if has_room and oldest.expires_s > now_s:
                return
            self._images.popitem(last=False)
            self.num_bytes -= len(oldest.data)


FILES_ROUTE = "/v1/images/files"


@dataclass(frozen=True, slots=True)
class ImageLinks:
    """Links to the images of `store`, below `public_url` or else as the request came."""

    store: ImageStore
    public_url: str = ""

    def add(self, file: bytes, kind: ImageKind, request: Request) -> str:
        """Keep a file for the caller; its link. Raises `InvalidRequest` for one that never fits."""
        name = self.store.add(file, kind, Context.of(request).principal.owner)
        base = self.public_url.rstrip("/") or _base(request)
        return f"{base}{FILES_ROUTE}/{name}.{kind}"

    def named(self, name: str, request: Request) -> StoredImage | None:
        """The caller's image of that name, if it is still kept."""
        image_id, _, suffix = name.partition(".")
        image = self.store.find(image_id, Context.of(request).principal.owner)
        return image if image is not None and image.kind == suffix else None

    def find(self, url: str, request: Request) -> Fetched | None:
        """The caller's image behind a link of ours; `None` for what is no such link.

        Raises `InvalidRequest` where there is none any more.
        """
        base, route, name = url.partition(FILES_ROUTE + "/")
        if not route:
            return None
        if (image := self.named(name, request)) is not None:
            return Fetched(image.data, MEDIA_TYPES[image.kind])
        if base in (self.public_url.rstrip("/"), _base(request)):
            raise InvalidRequest(
                "You have no such image here, or it was kept long enough: send it as a data URL.",
                param="messages",
            )
        return None


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")
