"""A language model's checkpoint with small changes that come with the eyes added to it.

Owns the names of the changes, and that they are added in float32 as a tensor is read, so that
nothing else needs to know of them. LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from triptych.core.weights.layout import TensorInfo
from triptych.core.weights.tensors.checkpoint import Checkpoint

PREFIX = "adapter."
DOWN, UP = ".down", ".up"


class AdaptedCheckpoint(Checkpoint):
    """`adapter.NAME.down` and `adapter.NAME.up` change the matrix `NAME` by their product."""

    def __init__(self, checkpoint: Checkpoint, scale: float) -> None:
        super().__init__(checkpoint.folder, _plain(checkpoint.tensors), checkpoint.config)
        self._checkpoint = checkpoint
        self._scale = scale

    def read(self, name: str) -> torch.Tensor:
        """As a checkpoint does. Raises `WeightsError`."""
        tensor = self._checkpoint.read(name)
        if f"{PREFIX}{name}{UP}" not in self._checkpoint.tensors:
            return tensor
        up, down = (self._checkpoint.read(f"{PREFIX}{name}{part}") for part in (UP, DOWN))
        return (tensor.float() + self._scale * up.float() @ down.float()).to(tensor.dtype)


def _plain(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: info for name, info in tensors.items() if not name.startswith(PREFIX)}
