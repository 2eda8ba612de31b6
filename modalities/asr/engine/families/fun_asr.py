"""Fun-ASR-Nano (Alibaba): a SAN-M encoder and an adaptor in front of Qwen3.

Owns its prompt with a context and a language.
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


class FunAsr(PromptedModel):
    """Writes the text that it is asked for."""

    network_class, processor_class = "FunAsrNanoForConditionalGeneration", "FunAsrNanoProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        return self.placed(
            self.processor.apply_transcription_request(
                window.pcm_S, language=window.language or None, prompt=window.prompt or None
            )
        )

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The sound in the language model's space."""
        yield Stage("encode whole", inputs["input_features"].shape[1])
        found: Tensor = self.network.get_audio_features(**inputs).pooler_output
        return found


open_fun_asr = partial(WindowedBlueprint, FunAsr)
