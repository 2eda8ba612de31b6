"""What a picture is to a language model: its features, and the cache that keeps them.

Owns the pair of tensors. Keys and references are the business of `core.content_cache` and
`modalities.vlm.scheduling`.

Shapes: N features, C hidden, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.content_cache import ContentCache


@dataclass(frozen=True, slots=True)
class Features:
    """One picture's features; `late_LNC` are added after the first layers, where a model has it."""

    hidden_NC: torch.Tensor
    late_LNC: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        late_bytes = 0 if self.late_LNC is None else self.late_LNC.nbytes
        return int(self.hidden_NC.nbytes + late_bytes)

    def clone(self) -> Features:
        """A copy that keeps nothing else alive."""
        late_LNC = None if self.late_LNC is None else self.late_LNC.clone()
        return Features(self.hidden_NC.clone(), late_LNC)


FeatureCache = ContentCache[Features]


def open_cache(capacity_bytes: int, max_entries: int) -> FeatureCache:
    """A cache by picture digest; with no entries it keeps only what is in use."""
    return ContentCache(capacity_bytes, copy=Features.clone, max_entries=max_entries)
