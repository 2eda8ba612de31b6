"""Keys of cached pages: a SHA-256 digest of a page's tokens and all tokens before it.

Owns the canonical encoding. Knows nothing of pages or memory. A key covers the namespace (model
weights), the adapter, the tenant's salt and every token from the first to the page's last, so two
pages with one key hold the same keys and values; all 256 bits are kept.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def root_key(namespace: bytes, *, adapter: str = "", tenant: str = "") -> bytes:
    """The parent key of a first page: covers model, adapter and tenant."""
    fields = (b"triptych kv 1", namespace, adapter.encode(), tenant.encode())
    return hashlib.sha256(
        b"".join(struct.pack("<q", len(field)) + field for field in fields)
    ).digest()


def page_key(parent: bytes, token_ids: Sequence[int], contents: bytes = b"") -> bytes:
    """The key of a full page of `token_ids` that follows the page with key `parent`.

    `contents` adds the full digests and positions of images, of which token ids hold only 62 bits.
    """
    packed = struct.pack(f"<{len(token_ids)}q", *token_ids)
    return hashlib.sha256(parent + packed + contents).digest()
