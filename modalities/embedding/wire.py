"""The messages of embedding models between API and engine: texts as ids, and their vectors.

Owns the wire types. No text is sent: the API process tokenizes. Vectors are sent as little-endian
float32.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="embed"):
    """Texts to embed independently. A text has at least one token.

    For a cross-encoder each is a pair, whose second part begins at its `second_starts`; the vector
    is its score.
    """

    texts: tuple[tuple[int, ...], ...]
    second_starts: tuple[int, ...] = ()
    tenant: str = ""


class EmbedDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="embedded"):
    """The vector of one text, or one per token if the model does not pool.

    Deltas arrive in the order of the texts; the last has a `finish_reason`.
    """

    text: int = 0
    vectors: bytes = b""
    finish_reason: Literal["stop", "cancelled"] | None = None
