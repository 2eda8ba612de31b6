"""The steps around the denoise loop: `encode` prompts, `prepare` a row, `decode` it.

Owns the order of events, which all pipelines share, and seeds. Other modules of this folder hold
the differences; `references.py` handles reference images.

A row may begin from an image: its latents, noised to the level of the step that the strength
determines. With a mask, the part outside it is restored at every step. Both follow diffusers'
img2img and inpaint pipelines, in the same order of random samples. At strength 1 nothing of the
image is left; without a mask, that is text to image. An image without any prompt is varied,
without guidance.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest
from triptych.core.runtime.devices.transfer import to_device, to_device_like
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise_row import (
    DenoiseRow,
    GuidanceBranch,
    Inpainting,
)
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.guidance import Guidance
from triptych.modalities.diffusion.engine.loading.components import denoiser_of
from triptych.modalities.diffusion.engine.prior import ImageTokens
from triptych.modalities.diffusion.engine.recipes.latents import (
    cell_mask,
    decode_latents,
    encode_image,
    image_tensor,
    mask_tensor,
    resize,
)
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import SampleRow, release_row, start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.sampler_names import with_sampler
from triptych.modalities.diffusion.spec import PipelineSpec, downscale
from triptych.modalities.diffusion.wire import ImageRequest

_WORD = 2**32 - 1
_KEY_AT = 24
"""Offset of the Mersenne Twister's words in the state of torch's generator, 8 bytes each."""

EncodedText: TypeAlias = dict[str, Tensor]
"""A prompt as model arguments without a batch dimension; depends on the prompt alone."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchPrompt:
    """The text of one guidance branch, and the images encoded with it: mostly none."""

    text: str
    is_negative: bool = False
    images: tuple[Pixels, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256, in hex, of everything that the encoding depends on."""
        digest = hashlib.sha256(f"{self.is_negative:d}{self.text}".encode())
        for image in self.images:
            digest.update(f"{image.width}x{image.height}".encode() + image.rgb)
        return digest.hexdigest()


class Recipe(ABC):
    """A pipeline's components, and the conversion of its requests to rows.

    `components`: the loaded parts by their names in model_index.json, and its plain entries;
    `scheduler` is the mapping in scheduler_config.json. `spec`: that of the pipeline's class.
    """

    samples_sources: ClassVar[bool] = (
        True  # encoding an image samples from its distribution instead of taking the mode
    )

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        self.components = components
        self.spec = spec

    @property
    def model(self) -> Any:
        """The denoising module."""
        return denoiser_of(self.components)

    @property
    def device(self) -> torch.device:
        """The device of the denoising module; its own `device` would check all layers for hooks."""
        weight: Tensor = next(self.model.parameters())
        return weight.device

    @property
    def vae(self) -> Any:
        """The pipeline's autoencoder."""
        return self.components["vae"]

    @property
    def default_size(self) -> tuple[int, int]:
        """The width and height that the model generates best."""
        return self.spec.default_size(self.model.config, self.vae.config, self.components)

    @property
    def pixel_multiple(self) -> int:
        """The number that divides width and height of an image."""
        return self.spec.pixel_multiple(self.vae.config)

    @property
    def token_side(self) -> int:
        """Pixels along the side of a token of the denoising model."""
        return self.pixel_multiple

    def prompts(self, request: ImageRequest) -> list[BranchPrompt]:
        """The prompts of the request's guidance branches, in their order."""
        prompts = [BranchPrompt(request.prompt)]
        is_variation = bool(request.sources) and not request.prompt and not request.negative_prompt
        if self.spec.is_guided(self.guidance_scale(request)) and not is_variation:
            prompts.append(BranchPrompt(request.negative_prompt, is_negative=True))
        return prompts

    def encode_all(self, prompts: Sequence[BranchPrompt]) -> list[EncodedText]:
        """Encode prompts of any requests, each as if it were alone."""
        return [self.encode(prompt.text, is_negative=prompt.is_negative) for prompt in prompts]

    def num_prompt_tokens(self, request: ImageRequest) -> int:
        """The number of prompt tokens read, counted by the first tokenizer."""
        return len(self.components["tokenizer"](request.prompt, verbose=False).input_ids)

    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        """The number of tokens at a prompt's end that no text encoder reads."""
        return 0

    def is_prompt_cut(self, request: ImageRequest) -> bool:
        """Whether the end of a prompt of the request is cut off."""
        return any(
            self.num_cut_tokens(prompt.text, is_negative=prompt.is_negative)
            for prompt in self.prompts(request)
        )

    def prepare(
        self,
        request: ImageRequest,
        pools: TensorPools,
        texts: Sequence[EncodedText] | None = None,
        *,
        index: int = 0,
        cache: CacheMethod | None = None,
    ) -> DenoiseRow:
        """The row of the request's image `index`, at its first step.

        Raises `InvalidRequest` for images the model cannot generate. `texts`: the encoded `prompts`
        of the request, if already available.
        """
        self.check(request)
        if texts is None:
            texts = self.encode_all(self.prompts(request))
        generator = seeded_generator(row_seed(request.seed or 0, index))
        clean = self._clean(request, generator)
        noise = torch.randn((1, *self.latent_shape(request)), generator=generator)[0]
        noise = to_device(self.to_sample(noise), self.device)
        conditionings = self.add_references(
            [self.conditioning(text, request) for text in texts], request, generator
        )
        inpainting = self.inpainting(request, clean, noise)
        sample = self._begin(request, noise, clean, generator, pools)
        with ExitStack() as stack:
            stack.callback(release_row, sample)
            branches = [
                GuidanceBranch(
                    conditioning=conditioning,
                    cache=None if cache is None else RowCache(cache, len(sample.timesteps), pools),
                )
                for conditioning in conditionings
            ]
            tokens = self.image_tokens(request, index, branches)
            stack.pop_all()
        return DenoiseRow(
            sample=sample,
            branches=branches,
            guidance=self.guidance_of(request),
            inpainting=inpainting,
            tokens=tokens,
        )

    def decode(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """Decode finished latents to an image, `[3 or 4, height, width]` in 0..1, float32."""
        return self.decode_all([(sample, request)])[0]

    def decode_all(self, samples: Sequence[tuple[Tensor, ImageRequest]]) -> list[Tensor]:
        """Decode images of one size together; one with layers is `[1 + layers, 4, ...]`."""
        latents = [self.to_latents(sample, request) for sample, request in samples]
        return list(decode_latents(self.vae, torch.stack(latents)))

    @abstractmethod
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        """Encode a prompt as model arguments."""

    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        """The arguments of a branch besides latents and time."""
        return Conditioning(rows=text)

    def add_references(
        self, branches: list[Conditioning], request: ImageRequest, generator: torch.Generator
    ) -> list[Conditioning]:
        """The conditioning of branches with reference images, if the model takes any."""
        return branches

    def image_tokens(
        self, request: ImageRequest, index: int, branches: Sequence[GuidanceBranch]
    ) -> ImageTokens | None:
        """The tokens that a language model writes before the first step, for these branches."""
        return None

    def num_reference_tokens(self, request: ImageRequest) -> int:
        """Tokens of reference images that a row has besides its own."""
        return 0

    def kept_bytes(self, request: ImageRequest) -> int:
        """Bytes that a row keeps besides latents and encoded prompts."""
        return 0

    @property
    def live_bytes(self) -> int:
        """Bytes of activations of a step before the first denoising step, if there is any."""
        return 0

    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        """The latents' channels, height and width; before them their number, with layers."""
        pixels = downscale(self.vae.config)
        channels = self.model.config.in_channels
        return channels, request.height // pixels, request.width // pixels

    def num_frames(self, request: ImageRequest) -> int:
        """The number of images that a row's latents have: more than one with layers."""
        return 1

    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        """Convert latents to the model's layout."""
        return latents_CHW

    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """The inverse of `to_sample`."""
        return sample

    def image_sample(self, image_3HW: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode an image in the model's layout: sampled with `generator`, else the mode."""
        return self.to_sample(encode_image(self.vae, image_3HW, generator))

    def mask_sample(self, mask_1HW: Tensor, request: ImageRequest) -> Tensor:
        """A mask in the model's layout: 1 where a latent is regenerated, 0 where it stays."""
        channels, height, width = self.latent_shape(request)
        return self.to_sample(cell_mask(mask_1HW, height, width).expand(channels, -1, -1))

    def spacing(self, request: ImageRequest) -> Spacing:
        """The spacing of the steps."""
        return Spacing(num_steps=self.num_steps(request))

    def guidance(self, scale: float) -> Guidance:
        """The combination of branches."""
        return Guidance(scale=scale)

    def guidance_of(self, request: ImageRequest) -> Guidance:
        """The combination of a request's branches."""
        return self.guidance(self.guidance_scale(request))

    def num_steps(self, request: ImageRequest) -> int:
        """Steps as the request counts them: some samplers evaluate the model twice per step."""
        return self.spec.default_steps if request.num_steps is None else request.num_steps

    def guidance_scale(self, request: ImageRequest) -> float:
        """The guidance scale of the request, or the default."""
        given = request.guidance_scale
        return self.spec.default_guidance if given is None else given

    def strength(self, request: ImageRequest) -> float:
        """How far the source image is changed; 1 without one."""
        if not request.sources:
            return 1.0
        return self.spec.strength_of(request.strength, has_mask=bool(request.mask))

    def check(self, request: ImageRequest) -> None:
        """Raise `InvalidRequest` for a size or images the model cannot handle."""
        self.spec.check_images(
            len(request.sources),
            num_steps=self.num_steps(request),
            strength=request.strength,
            has_mask=bool(request.mask),
        )
        multiple = self.pixel_multiple
        if request.width % multiple or request.height % multiple:
            raise InvalidRequest(
                f"Width and height must be multiples of {multiple} for this model, not "
                f"{request.width}x{request.height}.",
                param="size",
            )

    def _clean(self, request: ImageRequest, generator: torch.Generator) -> Tensor | None:
        """The source image's latents, if any of them are used."""
        if self.strength(request) == 1 and not request.mask:
            return None
        image = resize(image_tensor(request.sources[0]), request.height, request.width)
        source = generator if self.samples_sources else None
        return to_device(self.image_sample(image, source), self.device)

    def inpainting(
        self, request: ImageRequest, clean: Tensor | None, noise: Tensor
    ) -> Inpainting | None:
        """The part of a masked image that must stay; `None` if there is none."""
        if clean is None or not request.mask:
            return None
        mask = to_device_like(self.mask_sample(mask_tensor(request), request), clean)
        return Inpainting(clean=clean, mask=mask, noise=noise)

    def _begin(
        self,
        request: ImageRequest,
        noise: Tensor,
        clean: Tensor | None,
        generator: torch.Generator,
        pools: TensorPools,
    ) -> SampleRow:
        """The row at pure noise, or at the step that the strength determines."""
        strength, spacing = self.strength(request), self.spacing(request)
        return start_row(
            noise,
            with_sampler(self.components["scheduler"], request.sampler, spacing.mu),
            replace(spacing, begin=self.spec.first_step(spacing.num_steps, strength)),
            generator=generator,
            pools=pools,
            clean=clean if strength < 1 else None,
        )


def row_seed(seed: int, sample_index: int) -> int:
    """The generator seed of one image of a request; the first image has the request's seed."""
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 & _WORD


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator whose state depends on all 64 bits of a seed.

    Below 2**32 it equals torch's, so images match diffusers'. torch ignores higher bits; with them
    the state is that of the Mersenne Twister's `init_by_array` for both halves.
    """
    generator = torch.Generator().manual_seed(seed & _WORD)
    high = seed >> 32 & _WORD
    if high:
        state = generator.get_state()
        _, key, *_ = np.random.RandomState([seed & _WORD, high]).get_state(legacy=True)
        words = torch.from_numpy(np.asarray(key, np.int64))
        state[_KEY_AT : _KEY_AT + 8 * len(words)].view(torch.int64).copy_(words)
        generator.set_state(state)
    return generator
