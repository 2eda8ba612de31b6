"""Parakeet (NVIDIA): a FastConformer with a CTC, RNN-T or TDT head.

Owns running its encoder, which other families have, too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

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


class ParakeetCtc(CtcModel):
    """The CTC models."""

    network_class, processor_class = "ParakeetForCTC", "ParakeetProcessor"

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        return int(self.network.encoder.config.subsampling_factor)

    def logits(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The logits of all valid positions."""
        encoded_BTD, mask_BT = yield from encode(self, self.network.encoder, inputs)
        logits_TV: Tensor = self.network.ctc_head(encoded_BTD)[0]
        return logits_TV[mask_BT[0]]


class ParakeetRnnt(TransducerModel):
    """The RNN-T models."""

    network_class, processor_class = "ParakeetForRNNT", "ParakeetProcessor"

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        return int(self.network.encoder.config.subsampling_factor)

    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window."""
        encoder = self.network.encoder
        encoded_BTD, mask_BT = yield from encode(self, encoder, self.inputs(window))
        projected_TD = self.network.encoder_projector(encoded_BTD)[0][mask_BT[0]]
        return Heard((yield from self.transduce(projected_TD)))


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
