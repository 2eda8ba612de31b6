"""Features of images as pages: what engines that hand them to each other have in common.

Owns the names of an image's pages, which are its features' bytes, cut, and the protocol of the
memory behind them (the engine's: `modalities.vlm.engine.feature_memory`). Knows no tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

from triptych.core.engine_api.prompt_content import ContentSpan

FEATURE_PREFIX = "feature_"
"""Before the names of what the connections for features count."""


class FeatureMemory(Protocol):
    """Where features lie as pages, on their way. Page ids are used once."""

    capacity_bytes: int
    """Of features on their way at once."""

    def num_bytes_of(self, num_features: int) -> int:
        """Of the features of an image."""
        ...

    def num_pages_of(self, num_features: int) -> int:
        """Pages that they are cut into."""
        ...

    def drop(self, page_ids: Sequence[int]) -> None:
        """Forget pages that nobody reads or writes any more."""
        ...


class ReceivingMemory(FeatureMemory, Protocol):
    """Of an engine that has images encoded elsewhere."""

    def expect(self, num_features: int) -> Sequence[int]:
        """New pages for the features of an image."""
        ...

    def keep(self, digest: bytes, page_ids: Sequence[int]) -> bool:
        """Put pages that are written into the cache of features, with a reference; any thread.

        False where there is no room for them on the device.
        """
        ...


class SendingMemory(FeatureMemory, Protocol):
    """Of an engine that encodes images for others."""

    def keep(self, digest: bytes, features: Any) -> None:
        """Put what was encoded into the cache, with a reference."""
        ...

    def release(self, digest: bytes) -> None:
        """Give back a reference."""
        ...

    def lend(self, digest: bytes) -> Sequence[int]:
        """The pages of an image's features, kept until they are dropped; none if unknown."""
        ...


def page_keys(span: ContentSpan, num_pages: int) -> list[bytes]:
    """What the pages of an image's features are called."""
    return [span.digest + struct.pack("<I", index) for index in range(num_pages)]
