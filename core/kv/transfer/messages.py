"""What engines say to each other about pages: typed MessagePack in bounded frames.

Owns the messages and their bounds. Knows neither sockets nor schedulers. A connection is between
one model of an engine that listens, which has a role of its own, and the same model of one that
connects. Pages are those of a prompt's cache, or pieces of an image's features:

    prefill, encode              decode, and any other
    PageChallenge        ->
                        <-       PageGreeting        (proves that it knows the secret)
    PageWelcome          ->                          (so does this; or PageRefusal)
                        <-       FetchPages, DropFetch, PageCredit
    PageHeader + bytes   ->                          (or their place in shared memory)
    FetchEnded           ->
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from triptych.core.engine_api.prompt_content import PromptContent
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.pipeline import SOCKETS

VERSION = 2
NONCE_BYTES = 32
MAX_GREETING_BYTES = 64 * 2**10
"""Of a frame of somebody who has proved nothing yet, and of any frame of one that listens."""
MAX_REQUEST_BYTES = 64 * 2**20
"""Of a frame of one that connects: a prompt, and the images in it."""
MAX_TRANSFERS = 1024
"""Fetches of a connection that the other end has not ended."""
CACHE, FEATURES = "pages", "features"
"""What pages are of: a prompt's cache, the features of an image."""


class PageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What pages of two engines must have in common to stand for each other.

    `content` says what they are of, `transport` how they cross. `weights` is their digest, `layout`
    the shape and type of a page, `order` that of cells in it, `compute` what their values are
    computed in. No page has more than `page_bytes`.
    """

    content: str = CACHE
    transport: str = SOCKETS
    weights: str
    layout: str
    order: str
    compute: str
    max_length: int
    page_bytes: int

    def difference(self, other: PageFormat) -> str:
        """The first field that differs, and how; empty if none does."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours!s:.300} here, {theirs!s:.300} there"
        return ""


class PageChallenge(msgspec.Struct, frozen=True, tag=True):
    """Who connects is to prove that it knows the secret."""

    nonce: bytes
    version: int = VERSION


class PageGreeting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Who connects proves itself, and says what it wants pages of.

    Pages come in `num_slots` slots of shared memory, whose descriptor follows, or within the
    stream where that is 0. `num_credits` pages may be on the way.
    """

    nonce: bytes
    proof: bytes
    format: PageFormat
    num_credits: int
    num_slots: int = 0
    version: int = VERSION


class NixlRegion(msgspec.Struct, frozen=True):
    """Where slots lie that are read by NIXL: an agent's metadata, and their address there."""

    metadata: bytes
    address: int


class PageWelcome(msgspec.Struct, frozen=True, tag=True):
    """The listening end's own proof; pages cross by NIXL if it offers a region."""

    proof: bytes
    region: NixlRegion | None = None


class PageRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why there is to be no connection: `version`, `secret`, `format`, `shared-memory`."""

    code: str
    message: str


class FetchPages(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send the pages from `first` on, `num_pages` of them, of a prompt or an image."""

    fetch_id: int
    request: TokenRequest | PromptContent
    first: int
    num_pages: int


class DropFetch(msgspec.Struct, frozen=True, tag=True):
    """Its pages are not wanted any more."""

    fetch_id: int


class PageCredit(msgspec.Struct, frozen=True, tag=True):
    """A page was taken; another may be sent, in the slot of shared memory that it had."""

    slot: int = -1


class PageHeader(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next page of a fetch, called `key`: its `num_bytes` follow, or lie in a slot."""

    fetch_id: int
    key: bytes
    num_bytes: int
    slot: int = -1


class FetchEnded(msgspec.Struct, frozen=True, tag=True):
    """No more pages come of a fetch; with a reason where some are missing."""

    fetch_id: int
    reason: str = ""


FromPrefill = PageChallenge | PageWelcome | PageRefusal | PageHeader | FetchEnded
FromDecode = PageGreeting | FetchPages | DropFetch | PageCredit

encode = msgspec.msgpack.Encoder().encode


def proof(secret: bytes, role: str, nonces: tuple[bytes, bytes]) -> bytes:
    """That whoever is in `role` knows the secret, for one connection: HMAC-SHA256."""
    content = b"triptych pages 2 " + role.encode() + b"".join(nonces)
    return hmac.new(secret, content, hashlib.sha256).digest()


def is_proof(given: bytes, secret: bytes, role: str, nonces: tuple[bytes, bytes]) -> bool:
    """Whether `given` is the proof, found out in constant time."""
    are_nonces = all(len(nonce) == NONCE_BYTES for nonce in nonces)
    return hmac.compare_digest(given, proof(secret, role, nonces)) and are_nonces
