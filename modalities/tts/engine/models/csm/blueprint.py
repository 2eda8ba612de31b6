"""CSM before it is loaded: what it needs of a device, and how it is built.

Implements `modalities.tts.engine.models.blueprint.SpeechBlueprint`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from triptych.core.decoders.native import position_values
from triptych.core.weights.tensors.loading import TensorTarget
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.models.blueprint import (
    CloningBlueprint,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.csm.model import CsmConfig, CsmModel, depth_layout

_CODEBOOK_NAMES = (
    "depth_decoder.model.embed_tokens.weight",
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
)
CODEC_PREFIX = "codec_model."
_CONTEXT_STEPS = 250  # 20 s: without hearing itself, a speaker has another voice in each segment


class CsmBlueprint(CloningBlueprint[CsmModel]):
    """A checkpoint of `CsmForConditionalGeneration`, with Mimi in it."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = CsmConfig.read(config, max_length=setup.max_length)
        fields = self.config.fields
        super().__init__(
            setup,
            self.config.backbone,
            num_codebooks=fields.num_codebooks,
            num_logits=fields.vocab_size,
        )
        self.clip_end_ids = (fields.audio_eos_token_id,)
        self.traits = SpeechTraits(
            num_context_steps=_CONTEXT_STEPS, context_end_ids=self.clip_end_ids
        )
        self.codec = HubCodec(
            setup.folder,
            setup.options,
            config=fields.codec_config,
            prefix=CODEC_PREFIX,
            native=setup.native,
        )

    def weight_bytes(self) -> int:
        """Bytes of the parameters, and of the depth decoder's pages."""
        page_bytes = depth_layout(self.config.depth, self._setup.dtype).page_bytes
        return super().weight_bytes() + page_bytes * (self._setup.max_batch_size + 1)

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most a step of so many positions and rows holds; codes are drawn one at a time."""
        num_values = num_tokens * position_values(self.config.backbone)
        num_values += num_rows * position_values(self.config.depth)
        return num_values * self._setup.dtype.itemsize + 4 * 4 * num_rows * self.num_logits

    def sketch(self, device: torch.device) -> CsmModel:
        """The model, uninitialised."""
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return CsmModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)

    def targets(self, model: CsmModel, names: Collection[str] = ()) -> Iterable[TensorTarget]:
        """Both decoders share a table of codes, which a checkpoint has under one name or both."""
        held = [name for name in _CODEBOOK_NAMES if name in names] or _CODEBOOK_NAMES
        return model.targets(held[0])

    def is_unused(self, name: str) -> bool:
        """The codec is loaded by itself; both decoders' tables of codes are one."""
        return name.startswith(CODEC_PREFIX) or name in _CODEBOOK_NAMES
