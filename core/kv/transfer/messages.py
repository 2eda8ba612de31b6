"""The messages of page transfers between engines: typed MessagePack in bounded frames.

Owns the messages and their bounds. Knows neither sockets nor schedulers. A connection joins one
model of a listening engine, whose role is prefill or encode, to the same model of a connecting
engine. Pages hold a prompt's cache, or parts of an image's features:

    prefill, encode              decode, and any other
    PageChallenge        ->
                        <-       PageGreeting        (proves knowledge of the secret)
    PageWelcome          ->                          (also a proof; or PageRefusal)
                        <-       FetchPages, DropFetch, PageCredit
    PageHeader + bytes   ->                          (or a slot in shared memory) FetchEnded
    ->
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.options.pipeline import SOCKETS

VERSION = 3
NONCE_BYTES = 32
MAX_GREETING_BYTES = 64 * 2**10
"""The bound of frames from unauthenticated peers, and of all frames from the listening end."""
MAX_REQUEST_BYTES = 64 * 2**20
"""The bound of frames from the connecting end, which hold a prompt and its images."""
MAX_TRANSFERS = 1024
"""The most open fetches on one connection."""
CACHE, FEATURES = "pages", "features"
"""The content of pages: a prompt's cache, or the features of an image."""


class PageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that pages of two engines must share to be interchangeable.

    `content` is `CACHE` or `FEATURES`, `transport` the way they are sent. `weights` is the digest
    of the weights, `layout` the shape and type of a page, `order` the order of its cells, `compute`
    the type its values were computed in. The largest page has `page_bytes`.
    """

    content: str = CACHE
    transport: str = SOCKETS
    weights: str
    layout: str
    order: str
    compute: str
    max_length: int
    page_bytes: int

    def of_kind(self, kind: PartKind, page_bytes: int) -> PageFormat:
        """The format of one kind of parts."""
        layout = f"{self.layout}; {kind.name}"
        return msgspec.structs.replace(self, layout=layout, page_bytes=page_bytes)

    def difference(self, other: PageFormat) -> str:
        """Describe the first field that differs; empty if none does."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours!s:.300} here, {theirs!s:.300} there"
        return ""


class PageChallenge(msgspec.Struct, frozen=True, tag=True):
    """The listening end's challenge: the peer must prove knowledge of the secret."""

    nonce: bytes
    version: int = VERSION


class PageGreeting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connecting end's proof and page format.

    Pages arrive in `num_slots` slots of shared memory, whose descriptor follows, or within the
    stream if that is 0. At most `num_credits` pages may be in flight.
    """

    nonce: bytes
    proof: bytes
    format: PageFormat
    num_credits: int
    num_slots: int = 0
    version: int = VERSION


class NixlRegion(msgspec.Struct, frozen=True):
    """Slots to be read by NIXL: the agent's metadata, and the address of the slots."""

    metadata: bytes
    address: int


class PageWelcome(msgspec.Struct, frozen=True, tag=True):
    """The listening end's proof; pages are read by NIXL if it offers a region."""

    proof: bytes
    region: NixlRegion | None = None


class PageRefusal(msgspec.Struct, frozen=True, tag=True):
    """The connection is refused; `code` is `version`, `secret`, `format` or `shared-memory`."""

    code: str
    message: str


class FetchPages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request `num_pages` pages of a prompt or an image, starting at page `first`.

    They are sent as `num_parts` parts, in the order of `PartRule.needed`.
    """

    fetch_id: int
    request: TokenRequest | PromptContent
    first: int
    num_pages: int
    num_parts: int


class DropFetch(msgspec.Struct, frozen=True, tag=True):
    """Cancel a fetch."""

    fetch_id: int


class PageCredit(msgspec.Struct, frozen=True, tag=True):
    """A page was received; another may be sent, in the same slot of shared memory."""

    slot: int = -1


class PageHeader(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next part of a fetch's pages, with its key: `num_bytes` follow, or are in `slot`."""

    fetch_id: int
    key: bytes
    kind: int = 0
    num_bytes: int
    slot: int = -1

    def is_of(self, part: PagePart) -> bool:
        """Whether it is the header of this part."""
        return (self.key, self.kind) == (part.key, part.kind)


class FetchEnded(msgspec.Struct, frozen=True, tag=True):
    """The end of a fetch, with a reason if pages are missing."""

    fetch_id: int
    reason: str = ""


FromPrefill = PageChallenge | PageWelcome | PageRefusal | PageHeader | FetchEnded
FromDecode = PageGreeting | FetchPages | DropFetch | PageCredit

encode = msgspec.msgpack.Encoder().encode


def proof(secret: bytes, role: str, nonces: tuple[bytes, bytes]) -> bytes:
    """The proof that the peer in `role` knows the secret, for one connection: HMAC-SHA256."""
    content = b"triptych pages 3 " + role.encode() + b"".join(nonces)
    return hmac.new(secret, content, hashlib.sha256).digest()


def is_proof(given: bytes, secret: bytes, role: str, nonces: tuple[bytes, bytes]) -> bool:
    """Whether `given` is the right proof, compared in constant time."""
    are_nonces = all(len(nonce) == NONCE_BYTES for nonce in nonces)
    return hmac.compare_digest(given, proof(secret, role, nonces)) and are_nonces
