"""Higgs Audio V2 before it is loaded: what it needs of a device, and how it is built.

Implements `modalities.tts.engine.models.blueprint.SpeechBlueprint`. The published tokenizer is a
repository of its own: its folder is looked for in the model's, as `audio_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from triptych.core.weights.tensors.loading import TensorTarget
from triptych.modalities.tts.configs.higgs import CODEC_FOLDER
from triptych.modalities.tts.engine.codecs.loading import HubCodec
from triptych.modalities.tts.engine.models.blueprint import (
    CloningBlueprint,
    Codes,
    SpeechSetup,
    SpeechTraits,
)
from triptych.modalities.tts.engine.models.higgs.model import HiggsConfig, HiggsModel

_UNUSED = frozenset({"text_lm_head.weight", "model.embed_audio_tokens.audio_tokens_offsets"})


class HiggsBlueprint(CloningBlueprint[HiggsModel]):
    """A checkpoint of `HiggsAudioV2ForConditionalGeneration`."""

    def __init__(self, config: Mapping[str, Any], setup: SpeechSetup) -> None:
        self.config = HiggsConfig.read(config, max_length=setup.max_length)
        fields = self.config.fields
        super().__init__(
            setup,
            self.config.decoder,
            num_codebooks=fields.num_codebooks,
            num_logits=fields.codebook_size,
        )
        self.clip_end_ids = (fields.audio_eos_token_id, fields.eos_token_id)
        self.traits = SpeechTraits(delay_steps=fields.num_codebooks)
        self.codec = HubCodec(setup.folder / CODEC_FOLDER, setup.options, native=setup.native)

    def sketch(self, device: torch.device) -> HiggsModel:
        """The model, uninitialised."""
        num_slots, dtype = self._setup.max_batch_size, self._setup.dtype
        return HiggsModel(self.config, max_batch_size=num_slots, dtype=dtype, device=device)

    def targets(self, model: HiggsModel, names: Collection[str] = ()) -> Iterable[TensorTarget]:
        """Every tensor has one name."""
        return model.targets()

    def is_unused(self, name: str) -> bool:
        """What writes words, and offsets that follow from the configuration."""
        return name in _UNUSED

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

    def steps(self, codes_QF: Codes) -> Codes:
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
