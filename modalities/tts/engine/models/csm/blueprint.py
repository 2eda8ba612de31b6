"""CSM before it is loaded: what it needs of a device, and how it is built.

Implements `modalities.tts.engine.models.blueprint.SpeechBlueprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from triptych.core.decoders.native import position_values
from triptych.core.frames import frame_id
from triptych.core.layers.attention import KvLayout
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.loading import load_tensors
from triptych.modalities.tts.engine.codecs.open import HubCodec
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    SpeechCodec,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.csm.config import CsmConfig
from triptych.modalities.tts.engine.models.csm.model import CsmModel, depth_layout
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip

_CODEBOOK_NAMES = (
    "depth_decoder.model.embed_tokens.weight",
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
)
CODEC_PREFIX = "codec_model."
_CONTEXT_STEPS = 250  # 20 s: without hearing itself, a speaker has another voice in each segment


class CsmBlueprint:
    """A checkpoint of `CsmForConditionalGeneration`."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = CsmConfig.read(config, max_length=setup.max_length)
        self.max_length = self.config.backbone.rope.max_length
        self.num_logits = self.config.fields.vocab_size
        self.traits = SpeechTraits(
            num_context_steps=_CONTEXT_STEPS,
            context_end_ids=(self.config.fields.audio_eos_token_id,),
        )
        self._setup = setup
        codec_config = self.config.fields.codec_config
        self._codec = HubCodec(
            setup.folder,
            setup.options,
            config=codec_config,
            prefix=CODEC_PREFIX,
            native=setup.native,
        )

    def weight_bytes(self) -> int:
        """Bytes of the parameters, and of the depth decoder's pages."""
        sketch = self._sketch(torch.device("meta"))
        num_values = sum(target.into.numel() for target in sketch.targets(_CODEBOOK_NAMES[0]))
        pages = depth_layout(self.config.depth, self._setup.dtype).page_bytes * (
            self._setup.max_batch_size + 1
        )
        return num_values * self._setup.dtype.itemsize + pages

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most a step of so many positions and rows holds beside weights and cache."""
        config = self.config
        values = num_tokens * position_values(config.backbone)
        values += num_rows * position_values(config.depth)
        return values * self._setup.dtype.itemsize + 4 * 4 * num_rows * self.num_logits

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache of the backbone."""
        return self.config.backbone.kv_layout(page_size, dtype)

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> CsmModel:
        """Allocate, stream the weights into place and pack them."""
        model = self._sketch(self._setup.device)
        held = [name for name in _CODEBOOK_NAMES if name in checkpoint.tensors]
        name = held[0] if held else _CODEBOOK_NAMES[0]
        load_tensors(checkpoint, model.targets(name), ignored=_is_unused, report=report)
        with torch.inference_mode():
            model.prepare(self._setup.native)
        return model

    def codec_bytes(self) -> int:
        """Bytes of Mimi's weights."""
        return self._codec.num_bytes()

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load Mimi, both of its halves."""
        module: Any = self._codec.build(self._setup.device, report)

        def encode(pcm_S: torch.Tensor) -> torch.Tensor:
            codes_QF: torch.Tensor = module.encode(pcm_S[None, None]).audio_codes[0]
            return codes_QF[: self.config.fields.num_codebooks]

        return SpeechCodec(
            decoder=self._codec.decoder(
                module, num_rows=num_rows, num_codebooks=self.config.fields.num_codebooks
            ),
            codebook_size=self._codec.codebook_size(module),
            encode=encode,
        )

    def frames(self, steps_NK: Codes) -> Codes:
        """Each step is a frame."""
        return np.ascontiguousarray(steps_NK.T)

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """The clip's words, its frames, and the word that stands for the end of sound."""
        codes = tuple(map(tuple, codes_QF.T.tolist()))
        end_id = self.config.fields.audio_eos_token_id
        ids = (*clip.prompt_ids, *map(frame_id, codes), end_id)
        return VoicePrompt(prompt_ids=ids, codes=codes)

    def _sketch(self, device: torch.device) -> CsmModel:
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return CsmModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)


def _is_unused(name: str) -> bool:
    """The codec is loaded by itself; both decoders' tables of codes are one."""
    return name.startswith(CODEC_PREFIX) or name in _CODEBOOK_NAMES
