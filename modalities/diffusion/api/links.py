"""Pictures that are answered as links: where a link leads, and what a link of ours means.

Owns the spelling of links. What is kept, and for how long, is the store's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from triptych.core.errors import InvalidRequest
from triptych.core.http.context import Context
from triptych.core.media.fetch import Fetched
from triptych.modalities.diffusion.api.files import MEDIA_TYPES, PictureKind
from triptych.modalities.diffusion.api.store import PictureStore, StoredPicture

FILES_ROUTE = "/v1/images/files"


@dataclass(frozen=True, slots=True)
class PictureLinks:
    """Links to the pictures of `store`, below `public_url` or else as the request came."""

    store: PictureStore
    public_url: str = ""

    def add(self, file: bytes, kind: PictureKind, request: Request) -> str:
        """Keep a file for the caller; its link. Raises `InvalidRequest` for one that never fits."""
        name = self.store.add(file, kind, Context.of(request).principal.owner)
        base = self.public_url.rstrip("/") or _base(request)
        return f"{base}{FILES_ROUTE}/{name}.{kind}"

    def named(self, name: str, request: Request) -> StoredPicture | None:
        """The caller's picture of that name, if it is still kept."""
        picture_id, _, suffix = name.partition(".")
        picture = self.store.find(picture_id, Context.of(request).principal.owner)
        return picture if picture is not None and picture.kind == suffix else None

    def find(self, url: str, request: Request) -> Fetched | None:
        """The caller's picture behind a link of ours; `None` for what is no such link.

        Raises `InvalidRequest` where there is none any more.
        """
        base, route, name = url.partition(FILES_ROUTE + "/")
        if not route:
            return None
        if (picture := self.named(name, request)) is not None:
            return Fetched(picture.data, MEDIA_TYPES[picture.kind])
        if base in (self.public_url.rstrip("/"), _base(request)):
            raise InvalidRequest(
                "You have no such picture here, or it was kept long enough: send it as a data URL.",
                param="messages",
            )
        return None


def _base(request: Request) -> str:
    return str(request.base_url).rstrip("/")
