"""Features of images as pages of bytes, for transfer between engines.

Owns how features are cut into pages: their bytes as stored, hidden states before late features.
Both classes implement `core.kv.transfer.memory.PageMemory`, and the protocols of
`modalities.vlm.scheduling.features`. On a CPU numpy copies, as in
`core.runtime.engine.page_memory`.

Shapes: D hidden states and late ones (1 + L), N features of an image, C hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from triptych.core.process.content_cache import ContentCache
from triptych.core.runtime.engine.page_memory import HostCopies
from triptych.modalities.vlm.engine.encoder import FeatureCache, FeatureLayout, Features

PAGE_BYTES = 2**18
_log = logging.getLogger(__name__)


class FeaturePages:
    """The common part of both ends: features in `layout`, at most `capacity_bytes` in transfer."""

    def __init__(self, layout: FeatureLayout, capacity_bytes: int) -> None:
        self.page_bytes = PAGE_BYTES
        self.capacity_bytes = capacity_bytes
        self._layout = layout
        self._ids = count()
        self._pages: dict[int, torch.Tensor] = {}

    def num_bytes_of(self, num_features: int) -> int:
        """Bytes of an image's features."""
        return num_features * self._layout.num_bytes

    def num_pages_of(self, num_features: int) -> int:
        """The number of pages of an image's features."""
        return -(-self.num_bytes_of(num_features) // self.page_bytes)

    def num_bytes(self, page_id: int) -> int:
        """Bytes of a page: an image's last page may be shorter."""
        return self._pages[page_id].nbytes

    def drop(self, page_ids: Sequence[int]) -> None:
        """Release pages whose transfer is complete."""
        for page_id in page_ids:
            del self._pages[page_id]

    def _cut(self, features_DNC: torch.Tensor) -> list[int]:
        pieces = features_DNC.view(torch.uint8).flatten().split(self.page_bytes)
        pages = {next(self._ids): piece for piece in pieces}
        self._pages.update(pages)
        return list(pages)


class IncomingFeatures(FeaturePages):
    """Features received from another engine, for the cache of this one."""

    def __init__(
        self, cache: FeatureCache, layout: FeatureLayout, capacity_bytes: int, device: torch.device
    ) -> None:
        super().__init__(layout, capacity_bytes)
        self._cache = cache
        self._device = device
        self._whole: dict[int, torch.Tensor] = {}

    def expect(self, num_features: int) -> Sequence[int]:
        """Allocate pages for the features of an image."""
        layout = self._layout
        shape = (layout.num_parts, num_features, layout.hidden_size)
        features_DNC = torch.empty(shape, dtype=layout.dtype)
        page_ids = self._cut(features_DNC)
        self._whole[page_ids[0]] = features_DNC
        return page_ids

    def read(self, page_id: int, buffer: memoryview) -> None:
        """Refuse: pages of this end are only written."""
        raise AssertionError("an engine that fetches features sends none")

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page from `buffer`."""
        self._pages[page_id].numpy()[:] = np.frombuffer(buffer, dtype=np.uint8)

    def keep(self, digest: bytes, page_ids: Sequence[int]) -> bool:
        """Insert received features into the cache, with a reference; false if memory is short."""
        try:
            features_DNC = self._whole[page_ids[0]].to(self._device)
        except torch.OutOfMemoryError:
            _log.warning("features of an image do not fit in device memory")
            return False
        hidden_NC, late_LNC = features_DNC[0], features_DNC[1:]
        features = Features(hidden_NC, late_LNC if len(late_LNC) else None, is_owned=True)
        self._cache.insert(digest, features, features.num_bytes)
        return True

    def drop(self, page_ids: Sequence[int]) -> None:
        """Release pages whose transfer is complete."""
        super().drop(page_ids)
        del self._whole[page_ids[0]]


class OutgoingFeatures(FeaturePages):
    """Features encoded for other engines, cached by digest; an entry is one tensor, DNC."""

    def __init__(
        self, layout: FeatureLayout, capacity_bytes: int, max_entries: int, device: torch.device
    ) -> None:
        super().__init__(layout, capacity_bytes)
        self._cache = ContentCache[torch.Tensor](
            capacity_bytes, copy=lambda features_DNC: features_DNC, max_entries=max_entries
        )
        self._copies = HostCopies(device)
        self._lent: dict[int, bytes] = {}

    def keep(self, digest: bytes, features: torch.Tensor) -> None:
        """Insert encoded features into the cache, with a reference."""
        self._cache.insert(digest, features, features.nbytes)

    def release(self, digest: bytes) -> None:
        """Release a reference to an image's features."""
        self._cache.release(digest)

    def lend(self, digest: bytes) -> Sequence[int]:
        """The pages of an image's features, kept until they are dropped; none if unknown."""
        features_DNC = self._cache.acquire(digest)
        if features_DNC is None:
            return ()
        page_ids = self._cut(features_DNC)
        self._lent[page_ids[0]] = digest
        return page_ids

    def read(self, page_id: int, buffer: memoryview) -> None:
        """Copy a page to `buffer`."""
        page = self._pages[page_id]
        if page.device.type == "cpu":
            np.frombuffer(buffer, dtype=np.uint8)[:] = page.numpy()
        else:
            self._copies.copy([torch.frombuffer(buffer, dtype=torch.uint8)], [page])

    def write(self, page_id: int, buffer: memoryview) -> None:
        """Refuse: pages of this end are only read."""
        raise AssertionError("an engine that encodes images receives no features")

    def drop(self, page_ids: Sequence[int]) -> None:
        """Release pages whose transfer is complete."""
        super().drop(page_ids)
        if page_ids:
            self._cache.release(self._lent.pop(page_ids[0]))
