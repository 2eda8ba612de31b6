"""CSM before it is loaded: what it needs of a device, and how it is built.

Implements `modalities.tts.models.blueprint.SpeechBlueprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from triptych.core.decoders.native import position_values
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.attention import KvLayout
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.loading import load_tensors
from triptych.modalities.tts.models.csm.config import CsmConfig
from triptych.modalities.tts.models.csm.model import CsmModel, depth_layout

_CODEBOOK_NAMES = (
    "depth_decoder.model.embed_tokens.weight",
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
)
CODEC_PREFIX = "codec_model."


class CsmBlueprint:
    """A checkpoint of `CsmForConditionalGeneration`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        max_length: int,
        max_batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        native: NativeKernels | None = None,
    ) -> None:
        self.config = CsmConfig.read(config, max_length=max_length)
        self.max_length = self.config.backbone.rope.max_length
        self.num_logits = self.config.fields.vocab_size
        self._max_batch_size = max_batch_size
        self._dtype = dtype
        self._device = device
        self._native = native

    def weight_bytes(self) -> int:
        """Bytes of the parameters, and of the depth decoder's pages."""
        sketch = self._sketch(torch.device("meta"))
        num_values = sum(target.into.numel() for target in sketch.targets(_CODEBOOK_NAMES[0]))
        pages = depth_layout(self.config.depth, self._dtype).page_bytes * (self._max_batch_size + 1)
        return num_values * self._dtype.itemsize + pages

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most a step of so many positions and rows holds beside weights and cache."""
        config = self.config
        values = num_tokens * position_values(config.backbone)
        values += num_rows * position_values(config.depth)
        return values * self._dtype.itemsize + 4 * 4 * num_rows * self.num_logits

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache of the backbone."""
        return self.config.backbone.kv_layout(page_size, dtype)

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> CsmModel:
        """Allocate, stream the weights into place and pack them."""
        model = self._sketch(self._device)
        held = [name for name in _CODEBOOK_NAMES if name in checkpoint.tensors]
        name = held[0] if held else _CODEBOOK_NAMES[0]
        load_tensors(checkpoint, model.targets(name), ignored=_is_unused, report=report)
        with torch.inference_mode():
            model.prepare(self._native)
        return model

    def _sketch(self, device: torch.device) -> CsmModel:
        return CsmModel(
            self.config, max_batch_size=self._max_batch_size, dtype=self._dtype, device=device
        )


def _is_unused(name: str) -> bool:
    """The codec is loaded by itself; both decoders' tables of codes are one."""
    return name.startswith(CODEC_PREFIX) or name in _CODEBOOK_NAMES
