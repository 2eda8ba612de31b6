"""Pictures that are answered as links, kept for a while.

Owns their bytes and ids: how many bytes are kept, for how long, and that nobody gets a picture who
does not own it and know its id. Lives in memory; a restart forgets them. Knows nothing of HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.api.files import PictureKind

ID_CHARS: Final = 43
_ID_BYTES: Final = 32  # of randomness: `ID_CHARS` in base64


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A file, and for how long it is still kept."""

    data: bytes
    kind: PictureKind
    owner: str
    expires_s: float


class PictureStore:
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
        self._pictures: OrderedDict[str, StoredPicture] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pictures)

    def add(self, data: bytes, kind: PictureKind, owner: str) -> str:
        """Keep a file of `owner`; its id. Raises `InvalidRequest` for one that never fits."""
        if len(data) > self.max_bytes:
            raise InvalidRequest(
                "The picture is too large to be kept for a link: ask for b64_json.",
                param="response_format",
            )
        now_s = self._clock()
        self._forget(now_s, len(data))
        picture_id = secrets.token_urlsafe(_ID_BYTES)
        self._pictures[picture_id] = StoredPicture(data, kind, owner, now_s + self.ttl_s)
        self.num_bytes += len(data)
        return picture_id

    def find(self, picture_id: str, owner: str) -> StoredPicture | None:
        """The file with that id; `None` where `owner` has none, or none any more."""
        self._forget(self._clock())
        picture = self._pictures.get(picture_id)
        return picture if picture is not None and picture.owner == owner else None

    def _forget(self, now_s: float, num_new_bytes: int = 0) -> None:
        """Drop what is over its time, and the oldest as long as there is no room."""
        while self._pictures:
            oldest = next(iter(self._pictures.values()))
            has_room = self.num_bytes + num_new_bytes <= self.max_bytes
            if has_room and oldest.expires_s > now_s:
                return
            self._pictures.popitem(last=False)
            self.num_bytes -= len(oldest.data)
