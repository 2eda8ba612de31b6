"""Image features as pages, for engines that transfer them to each other.

Owns the keys of an image's pages, which are slices of its features' bytes, and the protocols of the
memory that holds them (implemented in `modalities.vlm.engine.feature_memory`). Knows no tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

from triptych.core.engine_api.prompt_content import ContentSpan
from triptych.core.kv.parts import PagePart

FEATURE_PREFIX = "feature_"
"""Prefix of the metrics of connections for features."""


class FeatureMemory(Protocol):
    """Memory of features in transfer, as pages. Page ids are used once."""

    capacity_bytes: int
    """The bound of features in transfer at once."""

    def num_bytes_of(self, num_features: int) -> int:
        """The size of an image's features."""
        ...

    def num_pages_of(self, num_features: int) -> int:
        """The number of pages of an image's features."""
        ...

    def drop(self, page_ids: Sequence[int]) -> None:
        """Release pages that are no longer read or written."""
        ...


class ReceivingMemory(FeatureMemory, Protocol):
    """The memory of an engine that fetches features."""

    def expect(self, num_features: int) -> Sequence[int]:
        """Allocate pages for the features of an image."""
        ...

    def keep(self, digest: bytes, page_ids: Sequence[int]) -> bool:
        """Add written pages to the cache of features, with a reference; from any thread.

        False if the device has no room for them.
        """
        ...


class SendingMemory(FeatureMemory, Protocol):
    """The memory of an engine that encodes images for other engines."""

    def keep(self, digest: bytes, features: Any) -> None:
        """Add encoded features to the cache, with a reference."""
        ...

    def release(self, digest: bytes) -> None:
        """Release a reference."""
        ...

    def lend(self, digest: bytes) -> Sequence[int]:
        """The pages of an image's features, kept until dropped; empty if not cached."""
        ...


def feature_parts(span: ContentSpan, page_ids: Sequence[int]) -> list[PagePart]:
    """The pages of an image's features, under their keys."""
    keys = (span.digest + struct.pack("<I", index) for index in range(len(page_ids)))
    return [PagePart(key, page_id) for key, page_id in zip(keys, page_ids, strict=True)]
