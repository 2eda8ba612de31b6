"""What several recipes share: numbered text encoders, and flow matching's even spacing."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.text import TextEncoder
from triptych.modalities.diffusion.engine.samplers.registry import Spacing, dynamic_shift
from triptych.modalities.diffusion.wire import ImageRequest


class TextRecipe(Recipe):
    """A recipe with text encoders numbered as diffusers numbers them."""

    def text_encoder(self, number: int = 1) -> TextEncoder:
        """The tokenizer and encoder of a number, the first without one in its name."""
        suffix = "" if number == 1 else f"_{number}"
        return TextEncoder(
            self.components[f"tokenizer{suffix}"], self.components[f"text_encoder{suffix}"]
        )


class EvenFlow(TextRecipe):
    """Noise levels evenly from 1 to 1/steps, shifted for the picture's size."""

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        num_steps = self.num_steps(request)
        return Spacing(
            num_steps=num_steps,
            sigmas=tuple(float(level) for level in np.linspace(1, 1 / num_steps, num_steps)),
            mu=dynamic_shift(self.components["scheduler"], self.num_tokens(request)),
        )

    def num_tokens(self, request: ImageRequest) -> int:
        """The picture's size, as the shift measures it."""
        _, height, width = self.latent_shape(request)
        return height * width // 4
