"""The pipelines there are: which text encoders, which arguments, which spacing, each as published.

Owns the facts of each. A recipe yields what diffusers' pipeline of that name yields.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from triptych.modalities.diffusion.denoise import Guidance
from triptych.modalities.diffusion.families.family import Conditioning
from triptych.modalities.diffusion.recipes.latents import (
    downscale_of,
    pack,
    position_ids,
    unpack,
)
from triptych.modalities.diffusion.recipes.recipe import PictureRequest, Recipe
from triptych.modalities.diffusion.recipes.text import TextEncoder
from triptych.modalities.diffusion.samplers.registry import Spacing, dynamic_shift


class _Texts(Recipe):
    """A recipe with text encoders numbered as diffusers numbers them."""

    def text_encoder(self, number: int = 1) -> TextEncoder:
        """The tokenizer and encoder of a number, the first without one in its name."""
        suffix = "" if number == 1 else f"_{number}"
        return TextEncoder(
            self.components[f"tokenizer{suffix}"], self.components[f"text_encoder{suffix}"]
        )


class _EvenFlow(_Texts):
    """Noise levels evenly from 1 to 1/steps, shifted for the picture's size."""

    @override
    def spacing(self, request: PictureRequest) -> Spacing:
        num_steps = self._num_steps(request)
        return Spacing(
            num_steps=num_steps,
            sigmas=tuple(float(level) for level in np.linspace(1, 1 / num_steps, num_steps)),
            mu=dynamic_shift(self.components["scheduler"], self.num_tokens(request)),
        )

    def num_tokens(self, request: PictureRequest) -> int:
        """The picture's size, as the shift measures it."""
        _, height, width = self.latent_shape(request)
        return height * width // 4


class _Packed(_EvenFlow):
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

    default_steps = 28
    default_guidance = 3.5
    guides = False

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        clip = self.text_encoder(1).encode(prompt, masks=False)
        t5 = self.text_encoder(2).encode(prompt, length=512, masks=False)
        return {"pooled_projections": clip.pooled, "encoder_hidden_states": t5.hidden}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        hidden = text["encoder_hidden_states"]
        if self.model.config.guidance_embeds:
            text = {**text, "guidance": hidden.new_tensor(self._scale(request))}
        return _with_positions(self, text, request)

    @override
    def spacing(self, request: PictureRequest) -> Spacing:
        spacing = super().spacing(request)
        # Schedulers of the older kind space flow matching's noise levels themselves.
        spaces_itself = self.components["scheduler"].get("use_flow_sigmas")
        return replace(spacing, sigmas=None) if spaces_itself else spacing


class Chroma(_Packed):
    """Chroma: FLUX's form, T5 alone, one token of filling left unmasked."""

    default_steps = 35
    default_guidance = 5.0

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt, length=512)
        seen = torch.arange(len(text.mask), device=text.mask.device) <= text.mask.sum()
        return {"encoder_hidden_states": text.hidden, "attention_mask": seen.to(text.hidden.dtype)}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        mask = pad(text["attention_mask"], (0, self.num_tokens(request)), value=1.0)
        return _with_positions(self, {**text, "attention_mask": mask}, request)


class QwenImage(_Packed):
    """Qwen-Image: a vision-language model reads the prompt in a template, whose words are cut."""

    default_steps = 50
    default_guidance = 4.0
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


class ZImage(_EvenFlow):
    """Z-Image: a chat model reads the prompt; guidance counts from the prompt's own branch."""

    default_steps = 50
    default_guidance = 5.0

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        asked = encoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        text = encoder.encode(asked, length=512, layer=-2)
        return {"cap_feats": text.hidden[text.mask.bool()]}

    @override
    def latent_shape(self, request: PictureRequest) -> tuple[int, ...]:
        downscale = downscale_of(self.vae)
        channels = self.model.in_channels
        return channels, request.height // downscale, request.width // downscale

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW[:, None]

    @override
    def to_latents(self, sample: Tensor, request: PictureRequest) -> Tensor:
        return sample[:, 0]

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=1 + scale)


class Lumina2(_EvenFlow):
    """Lumina 2: a system prompt before the wanted prompt alone; shifted by the channels' number."""

    default_steps = 30
    default_guidance = 4.0
    _SYSTEM = (
        "You are an assistant designed to generate superior images with the superior degree of "
        "image-text alignment based on textual prompts or user prompts."
    )

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        asked = prompt if is_negative else f"{self._SYSTEM} <Prompt Start> {prompt}"
        text = self.text_encoder().encode(asked, length=256, layer=-2)
        return {"encoder_hidden_states": text.hidden, "encoder_attention_mask": text.mask}

    @override
    def num_tokens(self, request: PictureRequest) -> int:
        return self.latent_shape(request)[0]  # as the published pipeline has it

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale, keeps_norm=True)


class StableDiffusion3(_Texts):
    """SD3 and 3.5: two CLIPs side by side, T5 after them."""

    default_steps = 28
    default_guidance = 7.0
    _LENGTH = 256

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        clips = [
            self.text_encoder(number).encode(prompt, masks=False, layer=-2) for number in (1, 2)
        ]
        wide = torch.cat([clip.hidden for clip in clips], dim=-1)
        width = self.model.config.joint_attention_dim
        if self.components.get("text_encoder_3") is None:
            t5 = wide.new_zeros(self._LENGTH, width)
        else:
            t5 = self.text_encoder(3).encode(prompt, length=self._LENGTH, masks=False).hidden
        hidden = torch.cat([pad(wide, (0, width - wide.shape[-1])), t5])
        pooled = torch.cat([clip.pooled for clip in clips])
        return {"encoder_hidden_states": hidden, "pooled_projections": pooled}

    @override
    def spacing(self, request: PictureRequest) -> Spacing:
        _, height, width = self.latent_shape(request)
        num_tokens = height * width // self.model.config.patch_size**2
        mu = dynamic_shift(self.components["scheduler"], num_tokens)
        return Spacing(num_steps=self._num_steps(request), mu=mu)


class StableDiffusion(_Texts):
    """SD 1.5: one CLIP, a UNet."""

    default_steps = 50
    default_guidance = 7.5
    patch = 1

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        return {"encoder_hidden_states": self.text_encoder().encode(prompt, masks=False).hidden}


class StableDiffusionXL(_Texts):
    """SDXL: two CLIPs side by side; the model is told the picture's size."""

    default_steps = 50
    default_guidance = 5.0
    patch = 1

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        first, second = (
            self.text_encoder(number).encode(prompt, masks=False, layer=-2) for number in (1, 2)
        )
        hidden, pooled = torch.cat([first.hidden, second.hidden], dim=-1), second.pooled
        zeroes = self.components.get("force_zeros_for_empty_prompt", True)
        if is_negative and not prompt and zeroes:
            hidden, pooled = torch.zeros_like(hidden), torch.zeros_like(pooled)
        return {"encoder_hidden_states": hidden, "added_cond_kwargs.text_embeds": pooled}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        size = (request.height, request.width)
        told = text["encoder_hidden_states"].new_tensor((*size, 0, 0, *size))
        return Conditioning(rows={**text, "added_cond_kwargs.time_ids": told})


class PixArt(_Texts):
    """PixArt Sigma: T5 on the prompt in lower case."""

    default_steps = 20
    default_guidance = 4.5
    length = 300

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt.lower().strip(), length=self.length)
        return {"encoder_hidden_states": text.hidden, "encoder_attention_mask": text.mask}

    @override
    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
        told: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if not self.model.config.use_additional_conditions:
            return Conditioning(rows=text, shared={"added_cond_kwargs": told})
        size = text["encoder_hidden_states"].new_tensor((request.height, request.width))
        rows = {
            **text,
            "added_cond_kwargs.resolution": size,
            "added_cond_kwargs.aspect_ratio": size[:1] / size[1:],
        }
        return Conditioning(rows=rows)


class PixArtAlpha(PixArt):
    """PixArt Alpha: a shorter prompt; the 1024 model is told the picture's size."""

    length = 120


class Sana(_Texts):
    """Sana: Gemma reads the wanted prompt after the pipeline's instructions."""

    default_steps = 20
    default_guidance = 4.5
    patch = 1
    _LENGTH = 300

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        prompt = prompt.lower().strip()
        length = self._LENGTH
        if not is_negative:
            call = inspect.signature(diffusers.SanaPipeline.__call__).parameters
            told = "\n".join(call["complex_human_instruction"].default)
            prompt = told + prompt
            length += len(encoder.tokenizer.encode(told)) - 2
        text = encoder.encode(prompt, length=length)
        kept = [0, *range(length - self._LENGTH + 1, length)]
        return {
            "encoder_hidden_states": text.hidden[kept],
            "encoder_attention_mask": text.mask[kept],
        }


class AuraFlow(_Texts):
    """AuraFlow: T5's hidden states, zero where the filling is."""

    default_steps = 50
    default_guidance = 3.5

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt, length=256)
        return {"encoder_hidden_states": text.hidden * text.mask[:, None]}


def _with_positions(
    recipe: Recipe, text: dict[str, Tensor], request: PictureRequest
) -> Conditioning:
    _, height, width = recipe.latent_shape(request)
    hidden = text["encoder_hidden_states"]
    ids = {"img_ids": position_ids(height, width), "txt_ids": torch.zeros(len(hidden), 3)}
    shared = {name: value.to(hidden) for name, value in ids.items()}
    return Conditioning(rows=text, shared=shared, key=(height, width))
