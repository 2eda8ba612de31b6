"""The language side of a vision model, as the head drives it, and its form on our decoder.

Owns how features enter a step: they replace the embeddings of the positions that images fill, and
in some models are added again after the first layers.

Shapes: T tokens of the step, F of them filled by images, C hidden, L layers with late features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import LateInputs
from triptych.modalities.vlm.engine.encoder import Features


@dataclass(frozen=True, slots=True)
class StepImages:
    """The tokens of a step that images fill, and their features in the same order."""

    index_F: torch.Tensor
    features: Features


class VisionTextModel(CausalModel, Protocol):
    """The model behind a `VisionHead`, in addition to a text model's methods."""

    @property
    def text(self) -> CausalModel:
        """The model of the text alone, whose hidden states a head may read."""
        ...

    def see(
        self,
        token_ids_T: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: StepImages | None,
    ) -> torch.Tensor:
        """Compute `hidden_TC` of a step.

        `positions` are [T], or [A, T] if they have several axes.
        """
        ...


class SeeingDecoder:
    """Implements `VisionTextModel` with our decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = self.text = decoder
        self.vocab_size = decoder.vocab_size
        self.forward = decoder.forward
        self.logits = decoder.logits

    def see(
        self,
        token_ids_T: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: StepImages | None,
    ) -> torch.Tensor:
        """Run the layers on embeddings and features: `hidden_TC`."""
        x_TC, late = self.decoder.embed(token_ids_T), None
        if images is not None:
            x_TC.index_copy_(0, images.index_F, images.features.hidden_NC)
            late_LFC = images.features.late_LNC
            late = None if late_LFC is None else LateInputs(images.index_F, late_LFC)
        return self.decoder.run(x_TC, positions, step, late)
