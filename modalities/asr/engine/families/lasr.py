"""LASR (Google, the architecture of MedASR): a Conformer with a CTC head.

Owns running its encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.families.parakeet import encode
from triptych.modalities.asr.engine.windowed import WindowedBlueprint


class Lasr(CtcModel):
    """The CTC models."""

    network_class, processor_class = "LasrForCTC", "LasrProcessor"

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        return int(self.config.inputs_to_logits_ratio)

    def logits(self, inputs: dict[str, Any]) -> Generator[Stage, None, Tensor]:
        """The logits of all valid positions."""
        encoder = self.network.encoder
        encoded_BTD, mask_BT = yield from encode(self, encoder, inputs)
        logits_TV: Tensor = self.network.ctc_head(encoder.out_norm(encoded_BTD))[0]
        return logits_TV[mask_BT[0]]


open_lasr = partial(WindowedBlueprint, Lasr)
