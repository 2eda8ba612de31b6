"""Higgs Audio V2 before it is loaded: what it needs of a device, and how it is built.

Implements `modalities.tts.engine.models.blueprint.SpeechBlueprint`. The published tokenizer is a
repository of its own: its folder is looked for in the model's, as `audio_tokenizer`.
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
from triptych.modalities.tts.configs.higgs import CODEC_FOLDER
from triptych.modalities.tts.engine.codecs.open import HubCodec
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    SpeechCodec,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.higgs.config import HiggsConfig
from triptych.modalities.tts.engine.models.higgs.model import HiggsModel
from triptych.modalities.tts.plan import VoicePrompt
from triptych.modalities.tts.wire import VoiceClip


class HiggsBlueprint:
    """A checkpoint of `HiggsAudioV2ForConditionalGeneration`."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = HiggsConfig.read(config, max_length=setup.max_length)
        self.max_length = self.config.decoder.rope.max_length
        self.num_logits = self.config.fields.codebook_size
        self.traits = SpeechTraits(delay_steps=self.config.fields.num_codebooks)
        self._setup = setup
        self._codec = HubCodec(setup.folder / CODEC_FOLDER, setup.options, native=setup.native)

    def weight_bytes(self) -> int:
        """Bytes of the parameters."""
        sketch = self._sketch(torch.device("meta"))
        num_values = sum(target.into.numel() for target in sketch.targets())
        return num_values * self._setup.dtype.itemsize

    def activation_bytes(self, num_tokens: int, num_rows: int) -> int:
        """The most a step of so many positions and rows holds beside weights and cache."""
        values = num_tokens * position_values(self.config.decoder)
        num_logits = num_rows * self.config.fields.num_codebooks * self.num_logits
        return values * self._setup.dtype.itemsize + 4 * 4 * num_logits

    def kv_layout(self, page_size: int, dtype: torch.dtype) -> KvLayout:
        """The cache of the decoder."""
        return self.config.decoder.kv_layout(page_size, dtype)

    def build(self, checkpoint: Checkpoint, report: Callable[[float], None]) -> HiggsModel:
        """Allocate, stream the weights into place and pack them."""
        model = self._sketch(self._setup.device)
        ignored = {"text_lm_head.weight", "model.embed_audio_tokens.audio_tokens_offsets"}
        load_tensors(checkpoint, model.targets(), ignored=ignored, report=report)
        model.prepare(self._setup.native)
        return model

    def codec_bytes(self) -> int:
        """Bytes of the tokenizer's weights."""
        return self._codec.num_bytes()

    def open_codec(self, *, num_rows: int, report: Callable[[float], None]) -> SpeechCodec:
        """Load the tokenizer, both of its halves."""
        module: Any = self._codec.build(self._setup.device, report)

        def encode(pcm_S: torch.Tensor) -> torch.Tensor:
            codes_QF: torch.Tensor = module.encode(pcm_S[None, None]).audio_codes[0]
            return codes_QF

        return SpeechCodec(
            decoder=self._codec.decoder(
                module, num_rows=num_rows, num_codebooks=self.config.fields.num_codebooks
            ),
            codebook_size=self._codec.codebook_size(module),
            encode=encode,
        )

    def frames(self, steps_NK: Codes) -> Codes:
        """Frame f has its c-th code in step f + c + 1.

        The last frame holds a mark of the end, which counts as the last code, as transformers has
        it.
        """
        num_codes = steps_NK.shape[1]
        num_frames = len(steps_NK) - num_codes
        order_Q1 = np.arange(num_codes)[:, None]
        codes_QF = steps_NK[order_Q1 + 1 + np.arange(num_frames), order_Q1]
        return np.clip(codes_QF, 0, self.config.fields.audio_stream_bos_id - 1)

    def voice_prompt(self, clip: VoiceClip, codes_QF: Codes) -> VoicePrompt:
        """The clip's words, its steps, and the words that end the sound and the turn."""
        fields = self.config.fields
        codes = tuple(map(tuple, self.delayed(codes_QF).tolist()))
        end_ids = (fields.audio_eos_token_id, fields.eos_token_id)
        ids = (*clip.prompt_ids, *map(frame_id, codes), *end_ids)
        return VoicePrompt(prompt_ids=ids, codes=codes)

    def delayed(self, codes_QF: Codes) -> Codes:
        """Frames as the steps that say them, between the marks of a stream: `steps_NK`."""
        fields = self.config.fields
        num_codes, num_frames = codes_QF.shape
        steps_NK = np.full((num_frames + num_codes + 1, num_codes), fields.audio_stream_eos_id)
        order_1Q = np.arange(num_codes)[None]
        time_N1 = np.arange(len(steps_NK))[:, None] - order_1Q
        steps_NK[time_N1 < 1] = fields.audio_stream_bos_id
        order_Q1 = order_1Q.T
        steps_NK[order_Q1 + 1 + np.arange(num_frames), order_Q1] = codes_QF
        return steps_NK

    def _sketch(self, device: torch.device) -> HiggsModel:
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return HiggsModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)
