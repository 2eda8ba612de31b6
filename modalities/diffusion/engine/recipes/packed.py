"""Pipelines whose model takes the image as a sequence of tokens: FLUX.1, Chroma, Ovis-Image.

Owns the published facts of each: text encoders, arguments, spacing. A recipe gives the results of
diffusers' pipeline of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.engine.denoise_row import Inpainting
from triptych.modalities.diffusion.engine.families.model import Conditioning, ContextPlace
from triptych.modalities.diffusion.engine.recipes.latents import (
    encode_image,
    image_tensor,
    mask_tensor,
    pack,
    position_ids,
    resize,
    unpack,
)
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, EncodedText, Recipe
from triptych.modalities.diffusion.engine.recipes.references import Reference, ReferenceRecipe
from triptych.modalities.diffusion.engine.recipes.text import EvenFlow
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.spec import downscale
from triptych.modalities.diffusion.wire import ImageRequest

_UPRIGHT = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184),
    (944, 1104), (1024, 1024),
)  # fmt: skip
PREFERRED_KONTEXT_RESOLUTIONS = (*_UPRIGHT, *((long, short) for short, long in _UPRIGHT[:-1]))
"""Widths and heights that FLUX.1 Kontext was trained on, as published with it."""


class Packed(EvenFlow):
    """A recipe whose tokens are patches of 2 x 2 latents."""

    @override
    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        channels, height, width = super().latent_shape(request)
        return channels // 4, height, width

    @override
    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        return pack(latents_CHW)

    @override
    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        _, height, width = self.latent_shape(request)
        return unpack(sample, height, width)


class Flux(Packed):
    """FLUX.1: the guidance scale is an argument, unless the model ignores it (schnell)."""

    _LENGTH = 512

    @property
    @override
    def reader(self) -> int:
        return 2

    @override
    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        tokenizer = self.text_encoder(self.reader).tokenizer
        num_tokens = len(tokenizer(prompt, verbose=False).input_ids)
        length: int = min(tokenizer.model_max_length, self._LENGTH)
        return max(0, num_tokens - length)

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        return self.encode_all([BranchPrompt(prompt)])[0]

    @override
    def encode_all(self, prompts: Sequence[BranchPrompt]) -> list[EncodedText]:
        texts, t5 = [prompt.text for prompt in prompts], self.text_encoder(2)
        length = min(t5.tokenizer.model_max_length, self._LENGTH)
        clip, words = self.text_encoder(1).encode_all(texts), t5.encode_all(texts, length=length)
        return [
            {"pooled_projections": whole.pooled, "encoder_hidden_states": each.hidden}
            for whole, each in zip(clip, words, strict=True)
        ]

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        hidden = text["encoder_hidden_states"]
        if self.model.config.guidance_embeds:
            text = {**text, "guidance": hidden.new_full((), self.guidance_scale(request))}
        return _with_positions(self, text, request)

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        return unless_spaced(self, super().spacing(request))


class FluxFill(Flux):
    """FLUX.1 Fill: the model reads the image without its masked part, and the mask, as channels."""

    @override
    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        _, height, width = super().latent_shape(request)
        return self.vae.config.latent_channels, height, width

    @override
    def inpainting(
        self, request: ImageRequest, clean: Tensor | None, noise: Tensor
    ) -> Inpainting | None:
        return None  # the model itself keeps the rest of the image

    @override
    def add_references(
        self, branches: list[Conditioning], request: ImageRequest, generator: torch.Generator
    ) -> list[Conditioning]:
        size = request.height, request.width
        image = resize(image_tensor(request.sources[0]), *size)
        mask = (resize(mask_tensor(request), *size) >= 0.5).float()
        hidden = image * (1 - mask) + 0.5 * mask  # grey is zero to the autoencoder
        tokens = pack(encode_image(self.vae, hidden, generator))
        tokens = torch.cat([tokens, to_device_like(self._mask_tokens(mask), tokens)], dim=-1)
        context = to_device(tokens, self.device)
        return [
            replace(branch, context=context, context_place=ContextPlace.CHANNELS)
            for branch in branches
        ]

    def _mask_tokens(self, mask_1HW: Tensor) -> Tensor:
        """A channel for each pixel of a latent, packed as latents are."""
        side = downscale(self.vae.config)
        cells = mask_1HW[0].unflatten(0, (-1, side)).unflatten(2, (-1, side))
        return pack(cells.permute(1, 3, 0, 2).flatten(0, 1).contiguous())


class FluxKontext(ReferenceRecipe, Flux):
    """FLUX.1 Kontext: FLUX.1 with a reference image, at one of its training sizes."""

    samples_sources = False

    @override
    def fit_reference(self, image_3HW: Tensor, request: ImageRequest) -> Tensor:
        _, height, width = image_3HW.shape
        _, width, height = min(
            (abs(width / height - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS
        )
        multiple = self.pixel_multiple
        return resize(image_3HW, height // multiple * multiple, width // multiple * multiple)

    @override
    def encode_reference(self, image_3HW: Tensor) -> Reference:
        _, height, width = image_3HW.shape
        multiple = self.pixel_multiple
        tokens = pack(encode_image(self.vae, image_3HW))
        return Reference(tokens, height // multiple, width // multiple)

    @override
    def reference_arguments(
        self, shared: Mapping[str, Any], references: Sequence[Reference]
    ) -> dict[str, Any]:
        ids = shared["img_ids"]
        positions = [position_ids(2 * one.height, 2 * one.width) for one in references]
        for number, ids_T3 in enumerate(positions):
            ids_T3[:, 0] = 1 + number
        return {"img_ids": torch.cat([ids, *(to_device_like(each, ids) for each in positions)])}


class Chroma(Packed):
    """Chroma: as FLUX, with T5 only and one padding token unmasked."""

    window = 512

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        text = self.text_encoder().encode(prompt, length=self.window)
        seen = torch.arange(len(text.mask), device=text.mask.device) <= text.mask.sum()
        return {"encoder_hidden_states": text.hidden, "attention_mask": seen.to(text.hidden.dtype)}

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        mask = pad(text["attention_mask"], (0, self.num_tokens(request)), value=1.0)
        return _with_positions(self, {**text, "attention_mask": mask}, request)


class OvisImage(Packed):
    """Ovis-Image: as FLUX; Qwen encodes an instruction, which is cut off, and the prompt."""

    INSTRUCTION = (
        "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial "
        "relationships of the objects and background: "
    )
    NUM_INSTRUCTION = 28
    _LENGTH = 256
    window = _LENGTH

    @override
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoder = self.text_encoder()
        asked = encoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": self.INSTRUCTION + prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        tokens = encoder.tokenizer(
            [asked],
            max_length=self._LENGTH + self.NUM_INSTRUCTION,
            padding="max_length",
            truncation=True,
            add_special_tokens=False,
            return_tensors="pt",
        )
        text = encoder.read(tokens)
        hidden = text.hidden * text.mask[:, None]
        return {"encoder_hidden_states": hidden[self.NUM_INSTRUCTION :]}

    @override
    def conditioning(self, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
        placed = _with_positions(self, text, request)
        words = torch.arange(len(text["encoder_hidden_states"]))
        ids = torch.stack([torch.zeros_like(words), words, words], dim=1)
        shared = {**placed.shared, "txt_ids": to_device_like(ids, text["encoder_hidden_states"])}
        return replace(placed, shared=shared)

    @override
    def spacing(self, request: ImageRequest) -> Spacing:
        return unless_spaced(self, super().spacing(request))


def _with_positions(recipe: Recipe, text: dict[str, Tensor], request: ImageRequest) -> Conditioning:
    _, height, width = recipe.latent_shape(request)
    hidden = text["encoder_hidden_states"]
    ids = {"img_ids": position_ids(height, width), "txt_ids": torch.zeros(len(hidden), 3)}
    shared = {name: to_device_like(value, hidden) for name, value in ids.items()}
    return Conditioning(rows=text, shared=shared, key=(height, width))


def unless_spaced(recipe: Recipe, spacing: Spacing) -> Spacing:
    """Drop `sigmas` for schedulers that space flow-matching noise levels themselves."""
    spaces_itself = recipe.components["scheduler"].get("use_flow_sigmas")
    return replace(spacing, sigmas=None) if spaces_itself else spacing
