"""LASR (Google, the architecture of MedASR): a Conformer with a CTC head.

Owns running its encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from torch import Tensor

from triptych.core.engine_api.staged_plan import Stage
from triptych.modalities.asr.engine.decoding.ctc import CtcModel
from triptych.modalities.asr.engine.families.parakeet import encode
from triptych.modalities.asr.engine.window_model import Window
from triptych.modalities.asr.engine.windowed import WindowedBlueprint


class Lasr(CtcModel):
    """The CTC models."""

    network_class, processor_class = "LasrForCTC", "LasrProcessor"

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        return int(self.config.inputs_to_logits_ratio)

    def logits(self, window: Window) -> Generator[Stage, None, Tensor]:
        """The logits of all positions, which are valid without padding."""
        encoder = self.network.encoder
        encoded_BTD, _ = yield from encode(self, encoder, self.inputs(window))
        logits_BTV: Tensor = self.network.ctc_head(encoder.out_norm(encoded_BTD))
        return logits_BTV[0]


open_lasr = partial(WindowedBlueprint, Lasr)
