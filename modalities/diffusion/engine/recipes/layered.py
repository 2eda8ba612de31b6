"""Qwen-Image-Layered: an image is taken apart into layers with alpha channels.

Owns the published facts of its pipeline, and the picture that layers make. The recipe gives the
layers of diffusers' pipeline of the same name, which writes an absent prompt itself.

Legend: L layers, T tokens of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance
from triptych.modalities.diffusion.engine.recipes.latents import (
    decode_latents,
    encode_image,
    pack,
    resize,
    unpack,
)
from triptych.modalities.diffusion.engine.recipes.qwen import QwenImage, with_reference_shapes
from triptych.modalities.diffusion.engine.recipes.recipe import EncodedText
from triptych.modalities.diffusion.engine.recipes.references import Reference, ReferenceRecipe
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.wire import ImageRequest

_SHIFT_TOKENS = 256
"""The tokens of an image whose noise levels are shifted by 1; more, by the root of the ratio."""


class QwenImageLayered(ReferenceRecipe, QwenImage):
    """A row has the latents of the whole image, then those of each layer, the lowest first."""

    samples_sources = False

    @override
    def check(self, request: ImageRequest) -> None:
        super().check(request)
        if not request.prompt:
            raise InvalidRequest("This model needs a description of the image.", param="prompt")
        if request.mask or request.strength not in (None, 1.0):
            name = "mask" if request.mask else "strength"
            raise InvalidRequest(f"This model takes no {name}: it keeps the image.", param=name)

    @override
    def num_frames(self, request: ImageRequest) -> int:
        return 1 + self.spec.num_layers(request.num_layers)

    @override
    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        return self.num_frames(request), *super().latent_shape(request)

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        """Also of several, `[L, C, H, W]`."""
        height, width = latents_CHW.shape[-2:]
        return torch.cat([pack(one) for one in latents_CHW.view(-1, self._channels, height, width)])

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """Latents of the whole image."""
        return self._frames(sample, request)[0]

    @override
    def decode_all(self, samples: Sequence[tuple[Tensor, ImageRequest]]) -> list[Tensor]:
        """The picture that the layers make, and they, `[1 + L, 4, height, width]` each."""
        found = []
        for sample, request in samples:
            frames = self._frames(sample, request)[1:]
            layers = [decode_latents(self.vae, latents[None])[0] for latents in frames]
            found.append(torch.stack([flattened(layers), *layers]))
        return found

    @override
    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        *_, height, width = self.latent_shape(request)
        shapes = self.num_frames(request) * [(1, height // 2, width // 2)]
        has_alpha = torch.zeros((), dtype=torch.int64, device=self.device)
        return Conditioning(
            rows={**text, "additional_t_cond": has_alpha},
            shared={"img_shapes": [shapes]},
            key=(len(shapes), height, width),
        )

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale)

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        return replace(
            super().spacing(request), mu=math.sqrt(self.num_tokens(request) / _SHIFT_TOKENS)
        )

    @override
    def num_tokens(self, request: ImageRequest) -> int:
        *_, height, width = self.latent_shape(request)
        return height * width // 4

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        return resize(image_3HW, request.height, request.width)  # that of its layers

    @override
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        latents = encode_image(self.vae, image_3HW)
        return Reference(pack(latents), latents.shape[1] // 2, latents.shape[2] // 2)

    @override
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        return with_reference_shapes(shared, references)

    @property
    def _channels(self) -> int:
        return int(self.model.config.in_channels) // 4

    def _frames(self, sample: Tensor, request: ImageRequest) -> list[Tensor]:
        """Latents of the whole image and of each layer that a sample has."""
        *_, height, width = self.latent_shape(request)
        return [unpack(one, height, width) for one in sample.split(self.num_tokens(request))]


def flattened(layers_4HW: Sequence[Tensor]) -> Tensor:
    """The picture of layers over each other, the first the lowest, `[4, H, W]`."""
    colour_3HW = torch.zeros_like(layers_4HW[0][:3])  # times its alpha
    alpha_1HW = torch.zeros_like(layers_4HW[0][:1])
    for layer_4HW in layers_4HW:
        own_1HW = layer_4HW[3:]
        colour_3HW = layer_4HW[:3] * own_1HW + colour_3HW * (1 - own_1HW)
        alpha_1HW = own_1HW + alpha_1HW * (1 - own_1HW)
    opaque_1HW = torch.where(alpha_1HW > 0, alpha_1HW, 1)
    return torch.cat([colour_3HW / opaque_1HW, alpha_1HW])
