"""Qwen-Image: a vision-language model encodes the prompt, and when editing also the images.

Owns the published facts of its pipelines. A recipe gives the results of diffusers' pipeline of the
same name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance, NormRule
from triptych.modalities.diffusion.engine.recipes.latents import (
    encode_image,
    image_tensor,
    pack,
    resize,
)
from triptych.modalities.diffusion.engine.recipes.packed import Packed
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText
from triptych.modalities.diffusion.engine.recipes.references import (
    Reference,
    SeeingRecipe,
    bounded_aspect,
)
from triptych.modalities.diffusion.engine.recipes.text import SeenImages
from triptych.modalities.diffusion.wire import ImageRequest

CONDITION_IMAGE_SIZE = 384 * 384
"""Pixels of an image for the text encoder of later models."""
VAE_IMAGE_SIZE = 1024 * 1024
"""Pixels of a reference image."""
IMAGE_TOKEN, _SEEN_TOKEN = "<|image_pad|>", re.compile(r"<\|(image|video)_pad\|>")


class QwenImage(Packed):
    """Qwen-Image: the prompt is encoded in a template, whose tokens are cut off."""

    _TEMPLATE = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
        "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    _NUM_TEMPLATE = 34
    _LENGTH = 512
    window = _LENGTH

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(
            self._TEMPLATE.format(prompt), length=1024 + self._NUM_TEMPLATE, pads=False, layer=-1
        )
        kept = text.hidden[self._NUM_TEMPLATE :][: self._LENGTH]
        return {"encoder_hidden_states": kept}

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        shape = (1, height // 2, width // 2)
        return Conditioning(rows=text, shared={"img_shapes": [[shape]]}, key=shape)

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale, norm=NormRule.KEEP)


class QwenImageEdit(SeeingRecipe, QwenImage):
    """Qwen-Image-Edit: the image is encoded with the prompt, and is also a reference.

    The component `processor` is the image processor alone.
    """

    samples_sources = False
    window = 1024
    _EDIT_TEMPLATE = (
        "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, "
        "texture, objects, background), then explain how the user's text instruction should alter "
        "or modify the image. Generate a new image that meets the user's requirements while "
        "maintaining consistency with the original input where appropriate.<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    _NUM_EDIT_TEMPLATE = 64
    _IMAGE = "<|vision_start|>{1}<|vision_end|>"
    _READ_PIXELS = VAE_IMAGE_SIZE

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        return sized(image_3HW, VAE_IMAGE_SIZE)

    @override
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        multiple = self.pixel_multiple
        _, height, width = image_3HW.shape
        tokens = pack(encode_image(self.vae, image_3HW))
        return Reference(tokens, height // multiple, width // multiple)

    @override
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        return with_reference_shapes(shared, references)

    @override
    def read(self, prompt: BranchPrompt) -> EncodedText:
        encoder = self.text_encoder()
        shrunk = [sized(image_tensor(image), self._READ_PIXELS) for image in prompt.images]
        images = SeenImages.of(self.components["processor"], shrunk)
        shown = "".join(
            self._IMAGE.format(number, IMAGE_TOKEN * count)
            for number, count in enumerate(images.counts, 1)
        )
        words = without_images(encoder.cut(prompt.text, self.window))
        asked = self._EDIT_TEMPLATE.format(shown + words)
        tokens = encoder.tokenizer([asked], return_tensors="pt")
        text = encoder.read({**tokens, **images.inputs}, layer=-1)
        return {"encoder_hidden_states": text.hidden[self._NUM_EDIT_TEMPLATE :]}


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit 2509 and later: several numbered images, encoded at a smaller size."""

    _IMAGE = "Picture {}: <|vision_start|>{}<|vision_end|>"
    _READ_PIXELS = CONDITION_IMAGE_SIZE


def with_reference_shapes(
    shared: Mapping[str, Any], references: Sequence[Reference]
) -> dict[str, Any]:
    """The transformer's `img_shapes` of an image and its references: frames, height and width."""
    shapes = [(1, reference.height, reference.width) for reference in references]
    return {"img_shapes": [[*shared["img_shapes"][0], *shapes]]}


def without_images(prompt: str) -> str:
    """A prompt without the tokens that would stand for absent images.

    Spaces replace them: without, the text around one could make another.
    """
    return _SEEN_TOKEN.sub(" ", prompt)


def calculate_dimensions(num_pixels: int, aspect: float) -> tuple[int, int]:
    """Width and height of about so many pixels, as multiples of 32; `aspect` is width / height."""
    width = math.sqrt(num_pixels * aspect)
    return round(width / 32) * 32, round(width / aspect / 32) * 32


def sized(image_3HW: Tensor, num_pixels: int) -> Tensor:
    """Resize an image to about `num_pixels`, keeping its aspect unless that is extreme."""
    width, height = calculate_dimensions(num_pixels, bounded_aspect(image_3HW))
    return resize(image_3HW, max(32, height), max(32, width))
