"""Images returned as links, and the store behind the links.

Owns the format of links, and how long images are kept.
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
    """A file, its owner, and the time at which it expires."""

    data: bytes
    kind: ImageKind
    owner: str
    expires_s: float


class ImageStore:
    """Files by unguessable ids: at most `max_bytes` in all, each kept for `ttl_s`.

    The oldest are evicted to make room. Only one event loop may use it.
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
        """Keep a file of `owner`; returns its id. Raises `InvalidRequest` if it can never fit."""
        if len(data) > self.max_bytes:
            raise InvalidRequest(
                "The image is too large for a link: ask for b64_json.",
                param="response_format",
            )
        now_s = self._clock()
        self._forget(now_s, len(data))
        image_id = secrets.token_urlsafe(_ID_BYTES)
        self._images[image_id] = StoredImage(data, kind, owner, now_s + self.ttl_s)
        self.num_bytes += len(data)
        return image_id

    def find(self, image_id: str, owner: str) -> StoredImage | None:
        """The file with this id; `None` if `owner` has no such file, or it has expired."""
        self._forget(self._clock())
        image = self._images.get(image_id)
        return image if image is not None and image.owner == owner else None

    def _forget(self, now_s: float, num_new_bytes: int = 0) -> None:
        """Drop expired files, and the oldest until there is room for the new bytes."""
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
    """Links to the images of `store`, under `public_url` or else the request's base URL.

    `root_path` is the path under which a proxy publishes the server.
    """

    store: ImageStore
    public_url: str = ""
    root_path: str = ""

    def add(self, file: bytes, kind: ImageKind, request: Request) -> str:
        """Keep a file for the caller; returns its link. Raises as `ImageStore.add` does."""
        name = self.store.add(file, kind, Context.of(request).principal.owner)
        base = self.public_url.rstrip("/") or self._base(request)
        return f"{base}{FILES_ROUTE}/{name}.{kind}"

    def named(self, name: str, request: Request) -> StoredImage | None:
        """The caller's image with this name, if it is still kept."""
        image_id, _, suffix = name.partition(".")
        image = self.store.find(image_id, Context.of(request).principal.owner)
        return image if image is not None and image.kind == suffix else None

    def find(self, url: str, request: Request) -> Fetched | None:
        """The caller's image behind a link of this server; `None` for other URLs.

        Raises `InvalidRequest` if the link has expired.
        """
        base, route, name = url.partition(FILES_ROUTE + "/")
        if not route:
            return None
        if (image := self.named(name, request)) is not None:
            return Fetched(image.data, MEDIA_TYPES[image.kind])
        if base in (self.public_url.rstrip("/"), self._base(request)):
            raise InvalidRequest(
                "No such image, or its link has expired: send it as a data URL.",
                param="messages",
            )
        return None

    def _base(self, request: Request) -> str:
        return str(request.base_url).rstrip("/") + self.root_path
