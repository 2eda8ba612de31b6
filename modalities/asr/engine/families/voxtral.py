"""Voxtral (Mistral): Whisper's encoder in front of Llama.

Owns its prompt, after `mistral_common`, and running its encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.text.tokenizer import encode
from triptych.modalities.asr.engine.decoding.writing import PromptedModel
from triptych.modalities.asr.engine.window_model import Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint
from triptych.modalities.asr.spec import SAMPLE_RATE

_OPENING = ("<s>", "[INST]", "[BEGIN_AUDIO]")
_CLOSING = "[/INST]"
_REQUEST = "[TRANSCRIBE]"


class Voxtral(PromptedModel):
    """Writes the text that it is asked for, in a window of half a minute."""

    network_class = "VoxtralForConditionalGeneration"
    processor_class = "WhisperFeatureExtractor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        features = self.processor(
            window.pcm_S,
            sampling_rate=SAMPLE_RATE,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.processor.n_samples,
            return_tensors="pt",
        )
        ids_BT = torch.tensor([self._prompt_ids(window.language)])
        return self.placed({**features, "input_ids": ids_BT})

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space."""
        model = self.network.model
        tower = model.audio_tower
        hidden_BTD = yield from self.layerwise("encode", tower, tower.layers, **inputs)
        width = self.config.audio_config.intermediate_size
        merged_TD = tower.layer_norm(hidden_BTD).reshape(-1, width)
        projected_TD: Tensor = model.multi_modal_projector(merged_TD)
        return projected_TD

    def _prompt_ids(self, language: str) -> list[int]:
        sizes = self.config.audio_config
        num_places = sizes.max_source_positions * sizes.hidden_size // sizes.intermediate_size
        opening = [self.tokenizer.token_to_id(token) for token in (*_OPENING, _CLOSING, _REQUEST)]
        *before, closing, request = opening
        named = [f"lang:{language}"] if language else []
        spelled = encode(self.tokenizer, named, add_special_tokens=False)
        language_ids = [token_id for each in spelled for token_id in each.ids]
        places = [self.config.audio_token_id] * num_places
        return [*before, *places, closing, *language_ids, request]


open_voxtral = partial(WindowedBlueprint, Voxtral)
