"""The interface of a family: how a recognizer is measured, and built.

Owns the types that the loader and the families share. Knows no family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from triptych.core.runtime.engine.staged_runner import StagedModel
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.tensors.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintSetup:
    """The inputs of every blueprint: the files of model `name`, and where it computes in what."""

    checkpoint: Checkpoint
    name: str
    dtype: torch.dtype
    device: torch.device
    native: NativeKernels | None = None


class RecognizerBlueprint(Protocol):
    """A recognizer before its weights are read. Made from a `BlueprintSetup`."""

    def weight_bytes(self) -> int:
        """Bytes that the weights take."""

    def recording_bytes(self) -> int:
        """The most bytes of one running recording."""

    def build(self, report: Callable[[float], None]) -> StagedModel[Any]:
        """Load the weights. Raises `WeightsError` for files that do not fit the family."""
