"""Qwen-Image 2.1: words, images to look at and the generated image are one sequence.

Owns the published facts of its pipeline. The recipe gives the results of diffusers' pipeline of the
same name; keys and values of the words are computed at every step, not kept as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device_like
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.recipes.latents import encode_image, image_tensor
from triptych.modalities.diffusion.engine.recipes.qwen import (
    IMAGE_TOKEN,
    VAE_IMAGE_SIZE,
    sized,
    without_images,
)
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText
from triptych.modalities.diffusion.engine.recipes.references import Reference, SeeingRecipe
from triptych.modalities.diffusion.engine.recipes.text import (
    EvenFlow,
    SeenImages,
    before_final_norm,
)
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.spec import downscale
from triptych.modalities.diffusion.wire import ImageRequest

_IS_IMAGE = "is_image"
_TOKENS_PER_SLOT = 4
"""Latents for each token of an image that the text encoder reads."""


class QwenImage21(SeeingRecipe, EvenFlow):
    """Qwen-Image 2.1: Qwen3-VL reads prompt and images. Images are made with an alpha channel."""

    samples_sources = False
    window = 1024
    SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
    _USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

    @override
    def read(self, prompt: BranchPrompt) -> EncodedText:
        encoder, num_system = self.text_encoder(), len(self._tokens(self.SYSTEM))
        shrunk = [sized(image_tensor(image), VAE_IMAGE_SIZE) for image in prompt.images]
        images = SeenImages.of(self.components["processor"], shrunk)
        shown = " ".join(
            f"<image{number}><|vision_start|>{IMAGE_TOKEN * count}<|vision_end|>"
            for number, count in enumerate(images.counts, 1)
        )
        words = without_images(encoder.cut(prompt.text, self.window))
        asked = self.SYSTEM + self._USER.format(shown + (words or " "))
        ids = torch.tensor([self._tokens(asked)])
        is_image = ids == encoder.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images.inputs}
        if images.counts:
            tokens["mm_token_type_ids"] = is_image.int()
        with before_final_norm(encoder.module):
            text = encoder.read(tokens, layer=-1)
        return {
            "encoder_hidden_states": text.hidden[num_system:],
            _IS_IMAGE: is_image[0, num_system:],  # on the host, for the shape of the sequence
        }

    @override
    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        hidden, is_image = text["encoder_hidden_states"], text[_IS_IMAGE]
        own = is_image.new_ones(height * width // _TOKENS_PER_SLOT)
        mask = torch.cat([is_image, own])[None]
        return Conditioning(
            rows={"encoder_hidden_states": hidden},
            shared={
                "img_shapes": [[(1, height, width)]],
                "img_mask": to_device_like(mask, hidden).bool(),
            },
            key=(height, width, is_image.numpy().tobytes()),
        )

    @property
    @override
    def token_side(self) -> int:
        return downscale(self.vae.config)

    @override
    def num_tokens(self, request: ImageRequest) -> int:
        _, height, width = self.latent_shape(request)
        return height * width

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW.flatten(1).T.contiguous()

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        _, height, width = self.latent_shape(request)
        latents: Tensor = sample.T.unflatten(1, (height, width))
        return latents

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        """Noise levels in the model's files count for their own number of steps."""
        spacing, published = super().spacing(request), self.components.get("sample_sigmas")
        if published is None or len(published) != spacing.num_steps:
            return spacing
        return replace(spacing, sigmas=tuple(map(float, published)))

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        return sized(image_3HW, VAE_IMAGE_SIZE)

    @override
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        latents = encode_image(self.vae, image_3HW)
        _, height, width = latents.shape
        return Reference(self.to_sample(latents), height, width)

    @override
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        shapes = [(1, reference.height, reference.width) for reference in references]
        return {"img_shapes": [[*shapes, *shared["img_shapes"][0]]]}

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.text_encoder().tokenizer(text, verbose=False).input_ids
        return ids
