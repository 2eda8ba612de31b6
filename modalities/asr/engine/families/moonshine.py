"""Moonshine (Useful Sensors): an encoder of raw samples, and the one with windows for streams.

Owns running their encoders.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.writing import Encoded, EncoderDecoder
from triptych.modalities.asr.engine.windowed import WindowedBlueprint


class Moonshine(EncoderDecoder):
    """The models for whole recordings."""

    network_class = "MoonshineForConditionalGeneration"
    processor_class = "Wav2Vec2Processor"
    max_window_s = 24.0  # the decoder has 194 positions

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Encoded]:
        """The encoder's output, all of it valid."""
        encoder = self.network.model.encoder
        hidden_BTD = yield from self.layerwise("encode", encoder, encoder.layers, **inputs)
        mask_BT = torch.ones(hidden_BTD.shape[:2], dtype=torch.int, device=hidden_BTD.device)
        return encoder.layer_norm(hidden_BTD), mask_BT


class MoonshineStreaming(EncoderDecoder):
    """The models whose layers see windows of their own, so that all layers are one stage."""

    network_class = "MoonshineStreamingForConditionalGeneration"
    processor_class = "MoonshineStreamingProcessor"

    def encode(self, inputs: dict[str, Any]) -> Generator[Stage, None, Encoded]:
        """The encoder's output, and its mask."""
        yield Stage("encode whole", inputs["input_values"].shape[1])
        found = self.network.model.encoder(**inputs)
        return found.last_hidden_state, found.attention_mask


open_moonshine = partial(WindowedBlueprint, Moonshine)
open_streaming = partial(WindowedBlueprint, MoonshineStreaming)
