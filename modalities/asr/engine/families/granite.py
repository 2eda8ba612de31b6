"""Granite Speech (IBM): a Conformer with CTC in its middle, alone or in front of Granite.

Owns its prompt, and running its encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import WeightsError
from triptych.modalities.asr.engine.blueprint import BlueprintSetup
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.decoding.writing import PromptedModel
from triptych.modalities.asr.engine.window_model import Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint

_REQUEST = "can you transcribe the speech into a written format?"
"""The words of the model card."""


class GraniteCtc(CtcModel):
    """The encoder alone."""

    network_class, processor_class = "GraniteSpeech5ForCTC", "GraniteSpeech5Processor"

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        num_halvings = len(self.network.encoder.config.subsample_layers)
        return int(self.processor.feature_extractor.frame_stacking * 2**num_halvings)

    def logits(self, window: Window) -> Generator[Stage, None, Tensor]:
        """The logits of all valid positions."""
        inputs = self.inputs(window)
        yield Stage("encode whole", inputs["input_features"].shape[1])
        found = self.network.encoder(**inputs)
        logits_TV: Tensor = self.network.ctc_head(found.last_hidden_state)[0]
        return logits_TV[found.attention_mask[0].bool()]


class GraniteSpeech(PromptedModel):
    """Writes the text that it is asked for."""

    network_class = "GraniteSpeechForConditionalGeneration"
    processor_class = "GraniteSpeechProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        asked = {"role": "user", "content": f"{self.processor.audio_token}{_REQUEST}"}
        prompt = self.processor.tokenizer.apply_chat_template(
            [asked], tokenize=False, add_generation_prompt=True
        )
        return self.placed(self.processor(prompt, window.pcm_S, return_tensors="pt"))

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space."""
        mask_BT = inputs.pop("input_features_mask")
        yield Stage("encode whole", inputs["input_features"].shape[1])
        found_BTD: Tensor = self.network.get_audio_features(**inputs).pooler_output
        return found_BTD[mask_BT]


class GraniteSpeechPlus(GraniteSpeech):
    """The models that project several layers of the encoder."""

    network_class = "GraniteSpeechPlusForConditionalGeneration"


def _open(family: type[GraniteSpeech], setup: BlueprintSetup) -> WindowedBlueprint:
    if (setup.checkpoint.folder / "adapter_config.json").is_file():
        raise WeightsError(
            f"{setup.name}: its language model reads sound through an adapter"
            " (adapter_config.json), which is not loaded: take a release with merged weights, such"
            " as granite-4.0-1b-speech."
        )
    return WindowedBlueprint(family, setup)


open_ctc = partial(WindowedBlueprint, GraniteCtc)
open_speech = partial(_open, GraniteSpeech)
open_speech_plus = partial(_open, GraniteSpeechPlus)
