"""Provides the features for a step's image positions.

Owns their source: the cache, or, in a model that is divided over ranks, rank 0's cache. Other ranks
have no cache and no encoder.

Shapes: T tokens of the step, F of them filled by images, C hidden, L layers with late features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from triptych.modalities.vlm.engine.encoder import FeatureCache, Features

if TYPE_CHECKING:
    from triptych.core.runtime.devices.rank_group import RankGroup

Part = tuple[bytes, int, int]
"""A range of an image's features: its digest, start and end."""


class StepFeatures(Protocol):
    """Provides the features of a step."""

    def take(self, parts: Sequence[Part], x_TC: torch.Tensor) -> Features:
        """The features of the parts, concatenated, in the type of `x_TC`."""
        ...


class CachedFeatures:
    """Implements `StepFeatures`. A step's scheduler holds references to the features it needs."""

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache

    def take(self, parts: Sequence[Part], x_TC: torch.Tensor) -> Features:
        """Read the features from the cache."""
        found = [(self._look_up(digest), low, high) for digest, low, high in parts]
        hidden_FC = torch.cat([each.hidden_NC[low:high] for each, low, high in found])
        late = [
            each.late_LNC[:, low:high] for each, low, high in found if each.late_LNC is not None
        ]
        late_LFC = torch.cat(late, 1).to(x_TC.dtype) if late else None
        return Features(hidden_FC.to(x_TC.dtype), late_LFC)

    def _look_up(self, digest: bytes) -> Features:
        features = self._cache.acquire(digest)
        assert features is not None, "the scheduler holds references to a step's features"
        self._cache.release(digest)
        return features


class LeadingFeatures(CachedFeatures):
    """Implements `StepFeatures` on rank 0, and sends the features to the other ranks."""

    def __init__(self, cache: FeatureCache, group: RankGroup) -> None:
        super().__init__(cache)
        self._group = group

    def take(self, parts: Sequence[Part], x_TC: torch.Tensor) -> Features:
        """Read the features from the cache and broadcast them."""
        features = super().take(parts, x_TC)
        sent = features.hidden_NC.unsqueeze(0)
        if features.late_LNC is not None:
            sent = torch.cat([sent, features.late_LNC])
        self._group.broadcast(sent.contiguous())
        return features


class FollowingFeatures:
    """Implements `StepFeatures` on the other ranks."""

    def __init__(self, group: RankGroup, num_late: int) -> None:
        self._group, self._num_late = group, num_late

    def take(self, parts: Sequence[Part], x_TC: torch.Tensor) -> Features:
        """Receive the features from rank 0."""
        num_filled = sum(high - low for _, low, high in parts)
        shape = (1 + self._num_late, num_filled, x_TC.shape[1])
        hidden_FC, *late = self._group.broadcast(x_TC.new_empty(shape))
        return Features(hidden_FC, torch.stack(late) if late else None)
