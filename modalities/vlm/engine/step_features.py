"""Provides the features for a step's image positions.

Owns their source: the cache, or, in a model that is divided over ranks, rank 0's cache. Other ranks
have no cache and no encoder.

Shapes: F tokens of the step that images fill, C hidden, L layers with late features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from triptych.modalities.vlm.engine.encoder import FeatureCache, FeatureLayout, Features

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

Part = tuple[bytes, int, int]
"""A range of an image's features: its digest, start and end."""


class StepFeatures(Protocol):
    """Provides the features of a step."""

    def take(self, parts: Sequence[Part]) -> Features:
        """The features of the parts, concatenated, in the model's type."""
        ...


class CachedFeatures:
    """Implements `StepFeatures`. A step's scheduler holds references to the features it needs."""

    def __init__(self, cache: FeatureCache, dtype: torch.dtype) -> None:
        self._cache = cache
        self._dtype = dtype

    def take(self, parts: Sequence[Part]) -> Features:
        """Read the features from the cache."""
        found = [(self._look_up(digest), low, high) for digest, low, high in parts]
        hidden_FC = torch.cat([each.hidden_NC[low:high] for each, low, high in found])
        late = [
            each.late_LNC[:, low:high] for each, low, high in found if each.late_LNC is not None
        ]
        late_LFC = torch.cat(late, 1).to(self._dtype) if late else None
        return Features(hidden_FC.to(self._dtype), late_LFC)

    def _look_up(self, digest: bytes) -> Features:
        features = self._cache.acquire(digest)
        assert features is not None, "the scheduler holds references to a step's features"
        self._cache.release(digest)
        return features


class LeadingFeatures(CachedFeatures):
    """Implements `StepFeatures` on rank 0, and sends the features to the other ranks."""

    def __init__(self, cache: FeatureCache, dtype: torch.dtype, group: RankGroup) -> None:
        super().__init__(cache, dtype)
        self._group = group

    def take(self, parts: Sequence[Part]) -> Features:
        """Read the features from the cache and broadcast them."""
        features = super().take(parts)
        sent = features.hidden_NC.unsqueeze(0)
        if features.late_LNC is not None:
            sent = torch.cat([sent, features.late_LNC])
        self._group.broadcast(sent.contiguous())
        return features


class FollowingFeatures:
    """Implements `StepFeatures` on the other ranks."""

    def __init__(self, group: RankGroup, layout: FeatureLayout, device: torch.device) -> None:
        self._group, self._layout, self._device = group, layout, device

    def take(self, parts: Sequence[Part]) -> Features:
        """Receive the features from rank 0."""
        layout = self._layout
        shape = (layout.num_parts, sum(high - low for _, low, high in parts), layout.hidden_size)
        empty = torch.empty(shape, dtype=layout.dtype, device=self._device)
        hidden_FC, *late = self._group.broadcast(empty)
        return Features(hidden_FC, torch.stack(late) if late else None)
