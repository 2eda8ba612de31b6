"""GLM-ASR (Z.ai): an encoder like Whisper's in front of Llama.

Owns its prompt, and running its encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.writing import PromptedModel
from triptych.modalities.asr.engine.window_model import Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint

_CONVOLUTIONS = ((1, 3, 1), (1, 3, 2))
"""Padding, kernel size and stride."""
_MERGED = 4


class GlmAsr(PromptedModel):
    """Writes the text that it is asked for."""

    network_class, processor_class = "GlmAsrForConditionalGeneration", "GlmAsrProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        return self.placed(self.processor.apply_transcription_request(window.pcm_S))

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space, without its padding."""
        model, mask_BF = self.network.model, inputs.pop("input_features_mask")
        tower = model.audio_tower
        hidden_BTD = yield from self.layerwise("encode", tower, tower.layers, **inputs)
        hidden_BTD = tower.norm(hidden_BTD)
        merged_BTD = hidden_BTD.reshape(
            len(hidden_BTD), -1, self.config.audio_config.intermediate_size
        )
        length = int(mask_BF.sum())
        for padding, kernel, stride in _CONVOLUTIONS:
            length = (length + 2 * padding - kernel) // stride + 1
        projected_TD: Tensor = model.multi_modal_projector(merged_BTD)[0]
        return projected_TD[: (length - _MERGED) // _MERGED + 1]


open_glm = partial(WindowedBlueprint, GlmAsr)
