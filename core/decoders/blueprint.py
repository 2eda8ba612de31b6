"""What the loader asks of a model before and while it is built.

Owns the protocol alone, so that our decoder and the fallback are alike to the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from triptych.core.engine.text_head import CausalModel
from triptych.core.layers.attention import KvLayout
from triptych.core.weights.tensors.checkpoint import Checkpoint


class Blueprint(Protocol):
    """A model that is known but not yet loaded."""

    max_length: int
    vocab_size: int

    def weight_bytes(self) -> int:
        """Device bytes of the weights once loaded."""
        ...

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most that one step holds beside weights and cache."""
        ...

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The shape of its cache."""
        ...

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> CausalModel:
        """Load the weights. Raises `WeightsError` naming tensor and file."""
        ...
