"""What a pipeline does around the denoise loop: `encode` prompts, `prepare` a row, `decode` it.

Owns the order of events, which is every pipeline's, and seeds. What differs is in the modules
beside it, images that a model looks at in `references.py`.

A row may begin from an image instead of noise alone: from its latents, made as noisy as they are
at the step that the strength says. Within a mask, what is outside it is put back at every step.
Both as diffusers' img2img and inpaint pipelines do it, in the same order of random draws. At
strength 1 nothing of the image is left: without a mask, that is generating from words. An image
without any prompt is varied: no prompt to go towards, so no second one to leave.
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
from triptych.core.runtime.devices.transfer import sent, sent_like
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise_row import (
    DenoiseRow,
    Guidance,
    GuidanceBranch,
    Inpainting,
)
from triptych.modalities.diffusion.engine.families.model import Conditioning
from triptych.modalities.diffusion.engine.loading.components import denoiser_of
from triptych.modalities.diffusion.engine.recipes.latents import (
    cell_mask,
    decode_latents,
    encode_image,
    fitted,
    image_tensor,
    mask_tensor,
)
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import SampleRow, release_row, start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.sampler_names import with_sampler
from triptych.modalities.diffusion.spec import PipelineSpec, downscale
from triptych.modalities.diffusion.wire import ImageRequest

_WORD = 2**32 - 1
_KEY_AT = 24
"""Where the Mersenne Twister's words begin in the state of torch's generator, 8 bytes for each."""

EncodedText: TypeAlias = dict[str, Tensor]
"""A prompt as the model's arguments, without a batch dimension: depends on nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchPrompt:
    """The text of one guidance branch, and the images that are read with it: mostly none."""

    text: str
    is_negative: bool = False
    images: tuple[Pixels, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of all that the encoding depends on, in hex."""
        digest = hashlib.sha256(f"{self.is_negative:d}{self.text}".encode())
        for image in self.images:
            digest.update(f"{image.width}x{image.height}".encode() + image.rgb)
        return digest.hexdigest()


class Recipe(ABC):
    """A pipeline's components, and how its requests become rows.

    `components`: the loaded parts by their names in model_index.json; `scheduler` is the mapping in
    its scheduler_config.json, and other entries of model_index.json may be among them.
    `spec`: those of the pipeline's class.
    """

    samples_sources: ClassVar[bool] = True  # an image's latents are generated, not the likeliest

    def __init__(self, components: Mapping[str, Any], spec: PipelineSpec) -> None:
        self.components = components
        self.spec = spec

    @property
    def model(self) -> Any:
        """The denoising module."""
        return denoiser_of(self.components)

    @property
    def device(self) -> torch.device:
        """Where the denoising module is. Its own answer would look at every layer for hooks."""
        weight: Tensor = next(self.model.parameters())
        return weight.device

    @property
    def vae(self) -> Any:
        """The autoencoder."""
        return self.components["vae"]

    @property
    def default_size(self) -> tuple[int, int]:
        """Width and height of what the model generates best."""
        return self.spec.default_size(self.model.config, self.vae.config, self.components)

    @property
    def pixel_multiple(self) -> int:
        """Width and height of an image are multiples of this."""
        return self.spec.pixel_multiple(self.vae.config)

    def prompts(self, request: ImageRequest) -> list[BranchPrompt]:
        """The prompts of the request's guidance branches, in their order."""
        prompts = [BranchPrompt(request.prompt)]
        is_variation = bool(request.sources) and not request.prompt and not request.negative_prompt
        if self.spec.is_guided(self.guidance_scale(request)) and not is_variation:
            prompts.append(BranchPrompt(request.negative_prompt, is_negative=True))
        return prompts

    def encode_all(self, prompts: Sequence[BranchPrompt]) -> list[EncodedText]:
        """Prompts of any requests, each as if it were alone."""
        return [self.encode(prompt.text, is_negative=prompt.is_negative) for prompt in prompts]

    def num_prompt_tokens(self, request: ImageRequest) -> int:
        """How many tokens of the prompt are read, by the first tokenizer's count."""
        return len(self.components["tokenizer"](request.prompt, verbose=False).input_ids)

    def num_cut_tokens(self, prompt: str, *, is_negative: bool) -> int:
        """How many tokens at a prompt's end no text encoder reads."""
        return 0

    def is_prompt_cut(self, request: ImageRequest) -> bool:
        """Whether the end of a prompt of the request is not read."""
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
        """A row of the request's image `index`, at its first step.

        Raises `InvalidRequest` for what the model cannot generate. `texts` are the request's
        `prompts`, encoded, where that was done before.
        """
        self.check(request)
        if texts is None:
            texts = self.encode_all(self.prompts(request))
        generator = seeded_generator(row_seed(request.seed or 0, index))
        clean = self._clean(request, generator)
        noise = torch.randn((1, *self.latent_shape(request)), generator=generator)[0]
        noise = sent(self.to_sample(noise), self.device)
        conditionings = self.refer([self.conditioning(text, request) for text in texts], request)
        inpainting = self._inpainting(request, clean, noise)
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
            stack.pop_all()
        guidance = self.guidance(self.guidance_scale(request))
        return DenoiseRow(
            sample=sample, branches=branches, guidance=guidance, inpainting=inpainting
        )

    def decode(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """The image of finished latents, `[3, height, width]` in 0..1, float32."""
        return self.decode_all([(sample, request)])[0]

    def decode_all(self, samples: Sequence[tuple[Tensor, ImageRequest]]) -> Tensor:
        """Images of one size together, `[N, 3, height, width]`."""
        latents = [self.to_latents(sample, request) for sample, request in samples]
        return decode_latents(self.vae, torch.stack(latents))

    @abstractmethod
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        """A prompt as the model's arguments."""

    def conditioning(self, text: EncodedText, request: ImageRequest) -> Conditioning:
        """All arguments of a branch beside latents and time."""
        return Conditioning(rows=text)

    def refer(self, branches: list[Conditioning], request: ImageRequest) -> list[Conditioning]:
        """The conditioning of branches, with the images that the model looks at, if it does."""
        return branches

    def latent_shape(self, request: ImageRequest) -> tuple[int, ...]:
        """The latents' channels, height and width."""
        pixels = downscale(self.vae.config)
        channels = self.model.config.in_channels
        return channels, request.height // pixels, request.width // pixels

    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        """Latents as the model takes them."""
        return latents_CHW

    def to_latents(self, sample: Tensor, request: ImageRequest) -> Tensor:
        """The inverse of `to_sample`."""
        return sample

    def image_sample(self, image_3HW: Tensor, generator: torch.Generator | None) -> Tensor:
        """An image as the model takes it; drawn from what is likely, or the likeliest."""
        return self.to_sample(encode_image(self.vae, image_3HW, generator))

    def mask_sample(self, mask_1HW: Tensor, request: ImageRequest) -> Tensor:
        """A mask as the model takes latents: each is regenerated, or stays."""
        channels, height, width = self.latent_shape(request)
        return self.to_sample(cell_mask(mask_1HW, height, width).expand(channels, -1, -1))

    def spacing(self, request: ImageRequest) -> Spacing:
        """Where the steps lie."""
        return Spacing(num_steps=self.num_steps(request))

    def guidance(self, scale: float) -> Guidance:
        """How branches become one."""
        return Guidance(scale=scale)

    def num_steps(self, request: ImageRequest) -> int:
        """Steps as the request counts them: some samplers ask the model more than once in one."""
        return self.spec.default_steps if request.num_steps is None else request.num_steps

    def guidance_scale(self, request: ImageRequest) -> float:
        """How strongly the prompt acts."""
        given = request.guidance_scale
        return self.spec.default_guidance if given is None else given

    def strength(self, request: ImageRequest) -> float:
        """How little is left of the image that is begun from; 1 where there is none."""
        if not request.sources:
            return 1.0
        return self.spec.strength_of(request.strength, has_mask=bool(request.mask))

    def check(self, request: ImageRequest) -> None:
        """Raises `InvalidRequest` for a size or images the model cannot generate."""
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
        """The latents that are begun from, or of which some stay."""
        if self.strength(request) == 1 and not request.mask:
            return None
        image = fitted(image_tensor(request.sources[0]), request.height, request.width)
        generated = generator if self.samples_sources else None
        return sent(self.image_sample(image, generated), self.device)

    def _inpainting(
        self, request: ImageRequest, clean: Tensor | None, noise: Tensor
    ) -> Inpainting | None:
        if clean is None or not request.mask:
            return None
        mask = sent_like(self.mask_sample(mask_tensor(request), request), clean)
        return Inpainting(clean=clean, mask=mask, noise=noise)

    def _begin(
        self,
        request: ImageRequest,
        noise: Tensor,
        clean: Tensor | None,
        generator: torch.Generator,
        pools: TensorPools,
    ) -> SampleRow:
        """The row at the noise, or where the strength lets it begin."""
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
    """The generator's seed of one of the images asked for together; the first has the seed's."""
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 & _WORD


def seeded_generator(seed: int) -> torch.Generator:
    """A generator of the CPU in whose state all 64 bits of a seed count.

    Below 2**32 it is torch's own, and so diffusers' images are generated. torch leaves out all
    higher bits; with them the state is what the Mersenne Twister's `init_by_array` makes of both
    halves.
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
