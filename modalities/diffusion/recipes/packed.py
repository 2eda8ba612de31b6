"""Pipelines whose model takes the picture as a sequence of tokens: FLUX and its kin.

Owns the facts of each: text encoders, arguments, spacing, as published. A recipe yields what
diffusers' pipeline of that name yields.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from triptych.modalities.diffusion.denoise import Guidance
from triptych.modalities.diffusion.families.family import Conditioning
from triptych.modalities.diffusion.recipes.bases import EvenFlow
from triptych.modalities.diffusion.recipes.latents import pack, position_ids, unpack
from triptych.modalities.diffusion.recipes.recipe import PictureRequest, Recipe
from triptych.modalities.diffusion.samplers.registry import Spacing


class _Packed(EvenFlow):
    """Latents as tokens of 2 x 2."""

    @override
    def latent_shape(self, request: PictureRequest) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(request)
        return channels // 4, height, width

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return pack(latents_CHW)

    @override
    def to_latents(self, sample: Tensor, request: PictureRequest) -> Tensor:
        _, height, width = self.latent_shape(request)
        return unpack(sample, height, width)


class Flux(_Packed):
    """FLUX.1: the guidance scale is told to the model, no second branch."""

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        clip = self.text_encoder(1).encode(prompt, masks=False)
        t5 = self.text_encoder(2).encode(prompt, length=512, masks=False)
        return {"pooled_projections": clip.pooled, "encoder_hidden_states": t5.hidden}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        hidden = text["encoder_hidden_states"]
        if self.model.config.guidance_embeds:
            text = {**text, "guidance": hidden.new_tensor(self.guidance_scale(request))}
        return _with_positions(self, text, request)

    @override
    def spacing(self, request: PictureRequest) -> Spacing:
        spacing = super().spacing(request)
        return _unless_spaced(self, spacing)

    @override
    def is_guided(self, scale: float) -> bool:
        return False


class Chroma(_Packed):
    """Chroma: FLUX's form, T5 alone, one token of filling left unmasked."""

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt, length=512)
        seen = torch.arange(len(text.mask), device=text.mask.device) <= text.mask.sum()
        return {"encoder_hidden_states": text.hidden, "attention_mask": seen.to(text.hidden.dtype)}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        mask = pad(text["attention_mask"], (0, self.num_tokens(request)), value=1.0)
        return _with_positions(self, {**text, "attention_mask": mask}, request)


class Flux2Klein(EvenFlow):
    """FLUX.2 Klein: tokens are single latents, three layers of a chat model read the prompt."""

    _LAYERS = (9, 18, 27)

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        asked = encoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        text = encoder.encode(asked, length=512, layer=self._LAYERS)
        return {"encoder_hidden_states": text.hidden}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        hidden = text["encoder_hidden_states"]
        words, places = torch.zeros(len(hidden), 4), torch.zeros(height, width, 4)
        words[:, 3] = torch.arange(len(hidden))
        places[..., 1:3] = torch.stack(
            torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1
        )
        shared = {"txt_ids": words.to(hidden), "img_ids": places.view(-1, 4).to(hidden)}
        return Conditioning(rows=text, shared=shared, key=(height, width))

    @override
    def latent_shape(self, request: PictureRequest) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(request)
        return channels, height // 2, width // 2

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW.flatten(1).T.contiguous()

    @override
    def to_latents(self, sample: Tensor, request: PictureRequest) -> Tensor:
        """Latents on the autoencoder's scale, which its batch norm knows by patch and channel."""
        norm = self.vae.bn
        deviation = (norm.running_var + self.vae.config.batch_norm_eps).sqrt()
        tokens = sample * deviation.to(sample) + norm.running_mean.to(sample)
        _, height, width = self.latent_shape(request)
        return unpack(tokens, 2 * height, 2 * width)

    @override
    def spacing(self, request: PictureRequest) -> Spacing:
        spacing = _unless_spaced(self, super().spacing(request))
        _, height, width = self.latent_shape(request)
        return replace(spacing, mu=_flux2_shift(height * width, spacing.num_steps))

    @override
    def is_guided(self, scale: float) -> bool:
        return scale > 1 and not self.components.get("is_distilled")


class QwenImage(_Packed):
    """Qwen-Image: a vision-language model reads the prompt in a template, whose words are cut."""

    _TEMPLATE = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
        "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    _NUM_TEMPLATE = 34
    _LENGTH = 512

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(
            self._TEMPLATE.format(prompt), length=1024 + self._NUM_TEMPLATE, pads=False, layer=-1
        )
        kept = text.hidden[self._NUM_TEMPLATE :][: self._LENGTH]
        return {"encoder_hidden_states": kept}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        _, height, width = self.latent_shape(request)
        shape = (1, height // 2, width // 2)
        return Conditioning(rows=text, shared={"img_shapes": [[shape]]}, key=shape)

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale, keeps_norm=True)


def _with_positions(
    recipe: Recipe, text: dict[str, Tensor], request: PictureRequest
) -> Conditioning:
    _, height, width = recipe.latent_shape(request)
    hidden = text["encoder_hidden_states"]
    ids = {"img_ids": position_ids(height, width), "txt_ids": torch.zeros(len(hidden), 3)}
    shared = {name: value.to(hidden) for name, value in ids.items()}
    return Conditioning(rows=text, shared=shared, key=(height, width))


def _unless_spaced(recipe: Recipe, spacing: Spacing) -> Spacing:
    # Schedulers of the older kind space flow matching's noise levels themselves.
    spaces_itself = recipe.components["scheduler"].get("use_flow_sigmas")
    return replace(spacing, sigmas=None) if spaces_itself else spacing


def _flux2_shift(num_tokens: int, num_steps: int) -> float:
    """FLUX.2's shift: fitted lines for 10 and 200 steps, and between them by the steps."""
    at_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * num_tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return slope * num_steps + at_200 - 200 * slope
