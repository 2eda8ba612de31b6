"""FLUX.2: tokens are single latents; inner layers of a language model encode the prompt.

Owns the published facts of its pipelines. A recipe gives the results of diffusers' pipeline of the
same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from torch import Tensor
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.recipes.latents import (
    cell_mask,
    encode_image,
    pack,
    unpack,
)
from triptych.modalities.diffusion.engine.recipes.packed import unless_spaced
from triptych.modalities.diffusion.engine.recipes.references import (
    Reference,
    ReferenceRecipe,
    fit_within,
)
from triptych.modalities.diffusion.engine.recipes.text import EvenFlow
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.wire import ImageRequest

_MAX_REFERENCE_PIXELS = 1024 * 1024
_REFERENCE_SPACING = 10  # the generated image is at time 0, the n-th reference at 10 n


class NormedPatches(EvenFlow):
    """Latents in patches of 2 x 2, scaled per channel by the autoencoder's batch norm."""

    @property
    def epsilon(self) -> float:
        """Added to the variance."""
        return float(self.vae.config.batch_norm_eps)

    @override
    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(request)
        return channels, height // 2, width // 2

    @override
    def num_tokens(self, request: ImageRequest) -> int:
        _, height, width = self.latent_shape(request)
        return height * width

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """Latents on the autoencoder's scale."""
        mean, deviation = self._norm(sample)
        _, height, width = self.latent_shape(request)
        return unpack(self.tokens_of(sample) * deviation + mean, 2 * height, 2 * width)

    @override
    def image_sample(self, image_3HW: Tensor, generator: torch.Generator | None) -> Tensor:
        latents = encode_image(self.vae, image_3HW, generator)
        _, height, width = latents.shape
        tokens = pack(latents)
        mean, deviation = self._norm(tokens)
        normed = (tokens - mean) / deviation
        return self.to_sample(normed.T.unflatten(1, (height // 2, width // 2)))

    def tokens_of(self, sample: Tensor) -> Tensor:
        """A sample as tokens `[T, C]`."""
        return sample

    def _norm(self, like: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.vae.bn
        deviation = (norm.running_var + self.epsilon).sqrt()
        return norm.running_mean.to(like), deviation.to(like)


class _Flux2(ReferenceRecipe, NormedPatches):
    """The common part of FLUX.2's pipelines: tokens are patches."""

    samples_sources = False

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        hidden = text["encoder_hidden_states"]
        words = torch.zeros(len(hidden), 4)
        words[:, 3] = torch.arange(len(hidden))
        places = {"txt_ids": words, "img_ids": _places(0, height, width)}
        # Not in the text's type: bfloat16 has no 257.
        shared = {name: to_device(place, hidden.device) for name, place in places.items()}
        return Conditioning(rows=text, shared=shared, key=(height, width))

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW.flatten(1).T.contiguous()

    @override
    def mask_sample(self, mask_1HW: Tensor, request: ImageRequest) -> Tensor:
        """A mask with soft edges, where a token covers pixels of both sides."""
        channels, height, width = self.latent_shape(request)
        mask = cell_mask(mask_1HW, height, width, mode="bilinear")
        return self.to_sample(mask.expand(channels, -1, -1))

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        spacing = unless_spaced(self, super().spacing(request))
        return replace(spacing, mu=_shift(self.num_tokens(request), spacing.num_steps))

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        return fit_within(image_3HW, _MAX_REFERENCE_PIXELS, self.pixel_multiple)

    @override
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        multiple = self.pixel_multiple
        _, height, width = image_3HW.shape
        return Reference(self.image_sample(image_3HW, None), height // multiple, width // multiple)

    @override
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        ids = shared["img_ids"]
        positions = [
            to_device_like(_places(_REFERENCE_SPACING * number, one.height, one.width), ids)
            for number, one in enumerate(references, 1)
        ]
        return {"img_ids": torch.cat([ids, *positions])}


class Flux2(_Flux2):
    """FLUX.2 dev: Mistral encodes the prompt; the guidance scale is an argument."""

    _LAYERS = (10, 20, 30)

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        said = {"system": SYSTEM_MESSAGE, "user": prompt.replace("[IMG]", "")}
        tokens = encoder.tokenizer.apply_chat_template(
            [
                {"role": role, "content": [{"type": "text", "text": text}]}
                for role, text in said.items()
            ],
            add_generation_prompt=False,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=512,
        )
        return {"encoder_hidden_states": encoder.read(tokens, layer=self._LAYERS).hidden}

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        scale = text["encoder_hidden_states"].new_full((), self.guidance_scale(request))
        return super().conditioning({**text, "guidance": scale}, request)


class Flux2Klein(_Flux2):
    """FLUX.2 Klein: Qwen encodes the prompt."""

    _LAYERS = (9, 18, 27)

    window = 512

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        asked: str = self.text_encoder().tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return asked

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        asked = self.format_prompt(prompt, is_negative=is_negative)
        text = self.text_encoder().encode(asked, length=self.window, layer=self._LAYERS)
        return {"encoder_hidden_states": text.hidden}


def _places(time: int, height: int, width: int) -> Tensor:
    """Time, row, column and text position of each token, `[height * width, 4]`."""
    places = torch.zeros(height, width, 4)
    places[..., 0] = time
    places[..., 1] = torch.arange(height)[:, None]
    places[..., 2] = torch.arange(width)[None]
    return places.view(-1, 4)


def _shift(num_tokens: int, num_steps: int) -> float:
    """The shift exponent: fitted lines for 10 and 200 steps, interpolated between them."""
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * num_steps + at_200 - 200 * slope
