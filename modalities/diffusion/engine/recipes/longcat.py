"""LongCat-Image: FLUX-like blocks; Qwen2.5-VL reads quoted words letter by letter.

Owns the published facts of its pipelines. A recipe gives the results of diffusers' pipeline of the
same name, which by default first has the text encoder rewrite the prompt: here it is as given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance, NormRule
from triptych.modalities.diffusion.engine.recipes.latents import (
    encode_image,
    image_tensor,
    pack,
    position_ids,
    resize,
)
from triptych.modalities.diffusion.engine.recipes.packed import Packed
from triptych.modalities.diffusion.engine.recipes.qwen import IMAGE_TOKEN, without_images
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText
from triptych.modalities.diffusion.engine.recipes.references import (
    Reference,
    SeeingRecipe,
    bounded_aspect,
)
from triptych.modalities.diffusion.engine.recipes.text import SeenImages
from triptych.modalities.diffusion.wire import ImageRequest

REFERENCE_SIZE = 1024 * 1024
"""Pixels of an edited image; its sides are multiples of 16."""
_LENGTH = 512
# Apostrophes within words are no quotes. (diffusers confuses several such words of a prompt.)
_APOSTROPHE = r"(?<=[a-zA-Z])'(?=[a-zA-Z])"
_QUOTE = r"(?:(?<![a-zA-Z])'|'(?![a-zA-Z]))"
_SINGLE = rf"{_QUOTE}(?:[^']|{_APOSTROPHE})*?{_QUOTE}|\u2018[^\u2018\u2019]*?\u2019"
_DOUBLE = r'"[^"]*?"|\u201c[^\u201c\u201d]*?\u201d'
_QUOTED = re.compile(f"({_SINGLE}|{_DOUBLE})")


class LongCatImage(Packed):
    """LongCat-Image: the prompt stands between instructions, which are cut off."""

    window = _LENGTH
    PREFIX = (
        "<|im_start|>system\nAs an image captioning expert, generate a descriptive text prompt"
        " based on an image content, suitable for input to a text-to-image model.<|im_end|>\n"
        "<|im_start|>user\n"
    )
    SUFFIX = "<|im_end|>\n<|im_start|>assistant\n"

    @override
    def num_prompt_tokens(self, request: ImageRequest) -> int:
        return min(len(self._prompt_tokens(request.prompt)), _LENGTH)

    @override
    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        """At least one of a prompt that is cut: not all of its letters are counted."""
        return max(0, len(self._prompt_tokens(prompt)) - _LENGTH)

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        prefix = self._tokens([self.PREFIX])
        return self._encode_after(prefix, prompt, num_cut=len(prefix))

    @override
    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        hidden = text["encoder_hidden_states"]
        words = torch.arange(len(hidden))
        start = torch.tensor([1, len(hidden), len(hidden)])  # beyond the text
        ids = {
            "img_ids": position_ids(height, width) + start,
            "txt_ids": torch.stack([torch.zeros_like(words), words, words], dim=1).float(),
        }
        # Not in the text's type: bfloat16 has no 513.
        shared = {name: to_device(value, hidden.device) for name, value in ids.items()}
        return Conditioning(rows=text, shared=shared, key=(height, width, len(hidden)))

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale, norm=NormRule.LIMIT)

    def _encode_after(
        self,
        prefix: list[int],
        prompt: str,
        *,
        num_cut: int,
        images: Mapping[str, Any] | None = None,
    ) -> EncodedText:
        """Encode a prompt between instructions, without the first `num_cut` tokens and the end."""
        encoder = self.text_encoder()
        words, suffix = self._prompt_tokens(prompt)[:_LENGTH], self._tokens([self.SUFFIX])
        padding = [encoder.tokenizer.pad_token_id] * (_LENGTH - len(words))
        mask = [1] * (len(prefix) + len(words)) + [0] * len(padding) + [1] * len(suffix)
        tokens = {
            "input_ids": torch.tensor([[*prefix, *words, *padding, *suffix]]),
            "attention_mask": torch.tensor([mask]),
        }
        text = encoder.read({**tokens, **(images or {})}, layer=-1)
        return {"encoder_hidden_states": text.hidden[num_cut : -len(suffix)]}

    def _prompt_tokens(self, prompt: str) -> list[int]:
        """The prompt's tokens: a quoted part, which is to be written, is read by its letters.

        Of a prompt that is cut, some of the tokens beyond the window are absent.
        """
        parts = [part for part in _QUOTED.split(prompt) if part]
        pieces = (piece for part in parts for piece in (part if _QUOTED.match(part) else [part]))
        return self._tokens(list(islice(pieces, _LENGTH + 1)))  # each is a token or more

    def _tokens(self, texts: Sequence[str]) -> list[int]:
        """The tokens of texts one after the other, each read on its own."""
        distinct = list(dict.fromkeys(texts))
        if not distinct:
            return []
        tokenizer = self.text_encoder().tokenizer
        found = tokenizer(distinct, add_special_tokens=False, verbose=False).input_ids
        ids_of = dict(zip(distinct, found, strict=True))
        return [token for text in texts for token in ids_of[text]]


class LongCatImageEdit(SeeingRecipe, LongCatImage):
    """LongCat-Image-Edit: the image is encoded with the prompt, and is also a reference."""

    samples_sources = False
    PREFIX = (
        "<|im_start|>system\nAs an image editing expert, first analyze the content and attributes "
        "of the input image(s). Then, based on the user's editing instructions, clearly and "
        "precisely determine how to modify the given image(s), ensuring that only the specified "
        "parts are altered and all other aspects remain consistent with the original(s)."
        "<|im_end|>\n"
        "<|im_start|>user\n"
    )

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale)

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        return _sized(image_3HW)

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
        ids = shared["img_ids"]
        (image,) = references
        places = to_device_like(position_ids(2 * image.height, 2 * image.width), ids)
        start = ids[0].clone()  # of the generated image
        start[0] += 1
        return {"img_ids": torch.cat([ids, places + start])}

    @override
    def read(self, prompt: BranchPrompt) -> EncodedText:
        (image,) = prompt.images
        large = _sized(image_tensor(image))
        half = resize(large, large.shape[1] // 2, large.shape[2] // 2)
        images = SeenImages.of(self.components["text_processor"], [half])
        instructions = self._tokens([self.PREFIX])
        seen = f"<|vision_start|>{IMAGE_TOKEN * images.counts[0]}<|vision_end|>"
        return self._encode_after(
            [*instructions, *self._tokens([seen])],
            prompt.text,
            num_cut=len(instructions),
            images=images.inputs,
        )

    @override
    def _prompt_tokens(self, prompt: str) -> list[int]:
        return super()._prompt_tokens(without_images(prompt))


def calculate_dimensions(num_pixels: int, aspect: float) -> tuple[int, int]:
    """Width and height of about so many pixels, as multiples of 16; `aspect` is width / height."""
    width = math.sqrt(num_pixels * aspect)
    return math.ceil(width / 16) * 16, math.ceil(width / aspect / 16) * 16


def _sized(image_3HW: Tensor) -> Tensor:
    """Resize an image to about `REFERENCE_SIZE`, keeping its aspect unless that is extreme."""
    width, height = calculate_dimensions(REFERENCE_SIZE, bounded_aspect(image_3HW))
    return resize(image_3HW, height, width)
