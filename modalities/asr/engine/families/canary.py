"""Canary (NVIDIA) and Cohere Transcribe: a FastConformer, and a decoder asked for languages.

Owns their prompts: the language spoken, and the one written.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.writing import Encoded, EncoderDecoder
from triptych.modalities.asr.engine.families.parakeet import encode
from triptych.modalities.asr.engine.window_model import Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint
from triptych.modalities.asr.spec import SAMPLE_RATE


class Canary(EncoderDecoder):
    """Recognizes, and translates to English."""

    network_class, processor_class = "CanaryForConditionalGeneration", "CanaryProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        return self.placed(
            self.processor.apply_transcription_request(
                window.pcm_S,
                source_language=window.language,
                target_language="en" if window.task == "translate" else window.language,
            )
        )

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Encoded]:
        """The encoder's output, and its mask."""
        return (yield from encode(self, self.network.model.encoder, inputs))


class CohereTranscribe(Canary):
    """Recognizes the language that the caller names."""

    network_class, processor_class = "CohereAsrForConditionalGeneration", "CohereAsrProcessor"

    def inputs(self, window: Window) -> dict[str, Any]:
        """The features and the prompt."""
        return self.placed(
            self.processor(window.pcm_S, language=window.language, sampling_rate=SAMPLE_RATE)
        )


open_canary = partial(WindowedBlueprint, Canary)
open_cohere = partial(WindowedBlueprint, CohereTranscribe)
