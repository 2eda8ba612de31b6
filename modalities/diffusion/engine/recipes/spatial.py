"""Pipelines whose model takes latents as a grid, from SD 1.5 to Z-Image.

Owns the published facts of each: text encoders, arguments, spacing. A recipe gives the results of
diffusers' pipeline of the same name.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from triptych.core.errors import WeightsError
from triptych.core.runtime.devices.transfer import to_device_like
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance, NormRule
from triptych.modalities.diffusion.engine.recipes.text import EvenFlow, TextRecipe
from triptych.modalities.diffusion.engine.samplers.registry import Spacing, dynamic_shift
from triptych.modalities.diffusion.spec import PipelineSpec, downscale
from triptych.modalities.diffusion.wire import ImageRequest


class ZImage(EvenFlow):
    """Z-Image: a chat model encodes the prompt; guidance adds to the positive branch."""

    window = 512

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        asked: str = self.text_encoder().tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        return asked

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        asked = self.format_prompt(prompt, is_negative=is_negative)
        text = self.text_encoder().encode(asked, length=self.window, layer=-2)
        return {"cap_feats": text.real}

    @override
    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        pixels = downscale(self.vae.config)
        return self.model.in_channels, request.height // pixels, request.width // pixels

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW[:, None]

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        return sample[:, 0]

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=1 + scale)


class Lumina2(EvenFlow):
    """Lumina 2: a system prompt before the positive prompt; shifted by the number of channels."""

    _SYSTEM = (
        "You are an assistant designed to generate superior images with the superior degree of "
        "image-text alignment based on textual prompts or user prompts."
    )

    window = 256

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        return prompt if is_negative else f"{self._SYSTEM} <Prompt Start> {prompt}"

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        asked = self.format_prompt(prompt, is_negative=is_negative)
        text = self.text_encoder().encode(asked, length=self.window, layer=-2)
        return {"encoder_hidden_states": text.hidden, "encoder_attention_mask": text.mask}

    @override
    def num_tokens(self, request: ImageRequest) -> int:
        return self.latent_shape(request)[0]  # as the published pipeline has it

    @override
    def guidance(self, scale: float) -> Guidance:
        return Guidance(scale=scale, norm=NormRule.KEEP)


class StableDiffusion3(TextRecipe):
    """SD3 and 3.5: two CLIPs concatenated in channels, followed by T5."""

    _LENGTH = 256

    @property
    @override
    def reader(self) -> int:
        return 1 if self.components.get("text_encoder_3") is None else 3

    @override
    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        encoder = self.text_encoder(self.reader)
        length = self._LENGTH if self.reader == 3 else encoder.tokenizer.model_max_length
        return max(0, len(encoder.tokenizer(prompt, verbose=False).input_ids) - length)

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
    def spacing(self, request: ImageRequest) -> Spacing:
        _, height, width = self.latent_shape(request)
        num_tokens = height * width // self.model.config.patch_size**2
        mu = dynamic_shift(self.components["scheduler"], num_tokens)
        return Spacing(num_steps=self.num_steps(request), mu=mu)


class StableDiffusion(TextRecipe):
    """SD 1.5: one CLIP and a UNet."""

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        return {"encoder_hidden_states": self.text_encoder().encode(prompt, masks=False).hidden}


class StableDiffusionXL(TextRecipe):
    """SDXL: two CLIPs concatenated in channels; the image size is an argument."""

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
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        size = (request.height, request.width)
        time_ids = to_device_like(torch.tensor((*size, 0, 0, *size)), text["encoder_hidden_states"])
        return Conditioning(rows={**text, "added_cond_kwargs.time_ids": time_ids})


class PixArt(TextRecipe):
    """PixArt Sigma: T5 encodes the prompt in lower case."""

    window = 300

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        return prompt.lower().strip()

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        asked = self.format_prompt(prompt, is_negative=is_negative)
        text = self.text_encoder().encode(asked, length=self.window)
        return {"encoder_hidden_states": text.hidden, "encoder_attention_mask": text.mask}

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        nothing: dict[str, Any] = {"resolution": None, "aspect_ratio": None}
        if not self.model.config.use_additional_conditions:
            return Conditioning(rows=text, shared={"added_cond_kwargs": nothing})
        size = torch.tensor((request.height, request.width))
        size = to_device_like(size, text["encoder_hidden_states"])
        rows = {
            **text,
            "added_cond_kwargs.resolution": size,
            "added_cond_kwargs.aspect_ratio": size[:1] / size[1:],
        }
        return Conditioning(rows=rows)


class PixArtAlpha(PixArt):
    """PixArt Alpha: a shorter prompt; the 1024 model takes the image size."""

    window = 120


class Sana(TextRecipe):
    """Sana: Gemma encodes the positive prompt after the pipeline's instructions."""

    _LENGTH = 300
    window = _LENGTH - 1  # after the instructions there is room for one token less

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        return prompt.lower().strip()

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        prompt = self.format_prompt(prompt, is_negative=is_negative)
        length = self._LENGTH
        if not is_negative:
            call = inspect.signature(diffusers.SanaPipeline.__call__).parameters
            instruction = "\n".join(call["complex_human_instruction"].default)
            prompt = instruction + prompt
            length += len(encoder.tokenizer.encode(instruction)) - 2
        text = encoder.encode(prompt, length=length)
        first = length - self._LENGTH + 1
        return {
            "encoder_hidden_states": torch.cat((text.hidden[:1], text.hidden[first:length])),
            "encoder_attention_mask": torch.cat((text.mask[:1], text.mask[first:length])),
        }


class SanaSprint(Sana):
    """Sana Sprint: Sana in few steps; the guidance scale is an argument."""

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        scale = self.guidance_scale(request) * self.model.config.guidance_embeds_scale
        guidance = text["encoder_hidden_states"].new_full((), scale)
        return super().conditioning({**text, "guidance": guidance}, request)


class AuraFlow(TextRecipe):
    """AuraFlow: T5's hidden states, zero at padding."""

    window = 256

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt, length=self.window)
        return {"encoder_hidden_states": text.hidden * text.mask[:, None]}


class HiDream(TextRecipe):
    """HiDream: two CLIPs' vectors, T5, and every layer of a Llama, padded with its end token."""

    _LENGTH = 128
    window = _LENGTH

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        super().__init__(components, spec)
        llama = components["tokenizer_4"]
        llama.pad_token = llama.eos_token

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        clips = [
            self.text_encoder(number).encode(prompt, length=self._LENGTH, masks=False)
            for number in (1, 2)
        ]
        t5 = self.text_encoder(3).encode(prompt, length=self._LENGTH)
        llama = self.text_encoder(4)
        depth = range(1, llama.module.config.num_hidden_layers + 1)
        layers = llama.encode(prompt, length=self._LENGTH, layer=depth).hidden
        return {
            "pooled_embeds": torch.cat([clip.pooled for clip in clips]),
            "encoder_hidden_states_t5": t5.hidden,
            "encoder_hidden_states_llama3": layers.unflatten(-1, (len(depth), -1)).transpose(0, 1),
        }

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        # Shifted as for the largest image, with FLUX's line, regardless of the scheduler.
        return Spacing(num_steps=self.num_steps(request), mu=dynamic_shift({}, self.model.max_seq))


class Wan(TextRecipe):
    """Wan 2.1: a video model that generates one frame. T5's hidden states, zero at padding.

    Raises `WeightsError` for Wan 2.2, which alternates between two models.
    """

    samples_sources = False
    window = 512

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        super().__init__(components, spec)
        if components.get("transformer_2") is not None or components.get("expand_timesteps"):
            raise WeightsError("Wan 2.2 is not supported yet: use a Wan 2.1 model.")

    @override
    def format_prompt(self, prompt: str, *, is_negative: bool) -> str:
        return " ".join(html.unescape(html.unescape(prompt)).split())

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        plain = self.format_prompt(prompt, is_negative=is_negative)
        text = self.text_encoder().encode(plain, length=self.window)
        return {"encoder_hidden_states": text.hidden * text.mask[:, None]}

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return latents_CHW[:, None]

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        return sample[:, 0]
