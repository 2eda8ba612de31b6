"""An encoder before it is loaded, of either kind: its sizes and its memory.

Owns the interface between the loader and the two kinds of encoders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from triptych.core.runtime.tensors.checkpoint import Checkpoint


class Sizes(Protocol):
    """The bounds of a text."""

    @property
    def max_length(self) -> int:
        """The most tokens of a text."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""


class EncoderBlueprint(ABC):
    """An encoder in a checkpoint. Raises `WeightsError` if it is unfit."""

    sizes: Sizes

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights."""

    @abstractmethod
    def activation_bytes(self, num_tokens: int) -> int:
        """Bytes of the activations of a step of `num_tokens`, or of the longest text."""

    @abstractmethod
    def build(self, device: torch.device, report: Callable[[float], None]) -> Any:
        """Load the encoder; see `runner.StateEncoder`."""

    def build_head(self, device: torch.device) -> nn.Module | None:
        """Load the projections from a pair's state to a score, if they are not in the encoder."""
        return None
