"""Parakeet (NVIDIA): a FastConformer with a CTC, RNN-T or TDT head.

Owns running its encoder, which other families have, too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.decoding.transducer import TransducerModel
from triptych.modalities.asr.engine.window_model import Heard, Window, WindowModel
from triptych.modalities.asr.engine.windowed import WindowedBlueprint


def encode(
    model: WindowModel, encoder: Any, inputs: dict[str, Any]
) -> Generator[Stage, None, tuple[Tensor, Tensor]]:
    """The output of a FastConformer [B, T, D], and the mask of its valid positions [B, T]."""
    encoded_BTD = yield from model.layerwise("encode", encoder, encoder.layers, **inputs)
    mask_BT = encoder._get_output_attention_mask(
        inputs["attention_mask"], target_length=encoded_BTD.shape[1]
    )
    return encoded_BTD, mask_BT


class FastConformer(WindowModel):
    """The encoder of all three."""

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        return int(self.network.encoder.config.subsampling_factor)

    def encoded(self, window: Window) -> Generator[Stage, None, Tensor]:
        """The encoder's output at all valid positions [B, T, D].

        Their number follows from the samples, so that no step waits for a mask on the device.
        """
        encoder, features = self.network.encoder, self.processor.feature_extractor
        encoded_BTD, _ = yield from encode(self, encoder, self.inputs(window))
        num_frames = torch.tensor(len(window.pcm_S) // features.hop_length)
        return encoded_BTD[:, : int(encoder._get_subsampling_output_length(num_frames))]


class ParakeetCtc(FastConformer, CtcModel):
    """The CTC models."""

    network_class, processor_class = "ParakeetForCTC", "ParakeetProcessor"

    def logits(self, window: Window) -> Generator[Stage, None, Tensor]:
        """The logits of all valid positions."""
        logits_BTV: Tensor = self.network.ctc_head((yield from self.encoded(window)))
        return logits_BTV[0]


class ParakeetRnnt(FastConformer, TransducerModel):
    """The RNN-T models."""

    network_class, processor_class = "ParakeetForRNNT", "ParakeetProcessor"

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window."""
        projected_BTD = self.network.encoder_projector((yield from self.encoded(window)))
        return Heard((yield from self.transduce(projected_BTD[0])))


class ParakeetTdt(ParakeetRnnt):
    """The TDT models."""

    network_class = "ParakeetForTDT"

    @property
    def durations(self) -> Sequence[int]:  # type: ignore[override]
        """The spans that the joint network chooses from, in positions."""
        return tuple(self.config.durations)


open_ctc = partial(WindowedBlueprint, ParakeetCtc)
open_rnnt = partial(WindowedBlueprint, ParakeetRnnt)
open_tdt = partial(WindowedBlueprint, ParakeetTdt)
