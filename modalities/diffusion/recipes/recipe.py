"""What a pipeline does around the denoise loop: `encode` prompts, `prepare` a row, `decode` it.

Owns the order of events, which is every pipeline's, and seeds. What differs is in `packed.py` and
`spatial.py`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.caches.methods import CacheMethod
from triptych.modalities.diffusion.caches.slot import CacheSlot
from triptych.modalities.diffusion.cells import CellPools
from triptych.modalities.diffusion.denoise import Branch, Guidance, Row
from triptych.modalities.diffusion.families.family import Conditioning
from triptych.modalities.diffusion.recipes.latents import decode_latents, downscale_of
from triptych.modalities.diffusion.samplers.registry import Spacing
from triptych.modalities.diffusion.samplers.rows import SampleRow, release_row, start_row

EncodedText: TypeAlias = dict[str, Tensor]
"""A prompt as the model's arguments, without a batch dimension: depends on nothing else."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one guidance branch is told. `digest` names all that its encoding depends on."""

    text: str
    is_negative: bool = False

    @property
    def digest(self) -> str:
        """SHA-256, in hex."""
        return hashlib.sha256(f"{self.is_negative:d}{self.text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRequest:
    """One picture. `num_steps` and `guidance_scale` are the pipeline's own where `None`."""

    prompt: str
    negative_prompt: str = ""
    width: int
    height: int
    num_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    sample_index: int = 0
    cache: CacheMethod | None = None


class Recipe(ABC):
    """A pipeline's components, and how its requests become rows.

    `components`: the loaded parts by their names in model_index.json; `scheduler` is the mapping in
    its scheduler_config.json, and other entries of model_index.json may be among them.
    """

    default_steps: ClassVar[int]
    default_guidance: ClassVar[float]
    patch: ClassVar[int] = 2  # latents a side that the model takes together

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.components = components

    @property
    def model(self) -> Any:
        """The denoising module."""
        return self.components.get("transformer") or self.components["unet"]

    @property
    def vae(self) -> Any:
        """The autoencoder."""
        return self.components["vae"]

    @property
    def pixel_multiple(self) -> int:
        """Width and height of a picture are multiples of this."""
        return downscale_of(self.vae) * self.patch

    def prompts(self, request: PictureRequest) -> list[Prompt]:
        """What the request's branches are told, in their order."""
        prompts = [Prompt(request.prompt)]
        if self.is_guided(self.guidance_scale(request)):
            prompts.append(Prompt(request.negative_prompt, is_negative=True))
        return prompts

    def encode_all(self, prompts: Sequence[Prompt]) -> list[EncodedText]:
        """Prompts of any requests, each as if it were alone."""
        return [self.encode(prompt.text, is_negative=prompt.is_negative) for prompt in prompts]

    def num_prompt_tokens(self, request: PictureRequest) -> int:
        """How many tokens the first tokenizer makes of the prompt."""
        return len(self.components["tokenizer"](request.prompt, verbose=False).input_ids)

    def prepare(
        self,
        request: PictureRequest,
        pools: CellPools,
        texts: Sequence[EncodedText] | None = None,
    ) -> Row:
        """A row at its first step. Raises `InvalidRequest` for a size the model cannot draw.

        `texts` are the request's `prompts`, encoded, where that was done before.
        """
        self.check(request)
        if texts is None:
            texts = self.encode_all(self.prompts(request))
        generator = torch.Generator().manual_seed(row_seed(request.seed, request.sample_index))
        noise = torch.randn((1, *self.latent_shape(request)), generator=generator)[0]
        told = [self.conditioning(text, request) for text in texts]
        sample = start_row(
            self.to_sample(noise).to(self.model.device),
            self.components["scheduler"],
            self.spacing(request),
            generator=generator,
            pools=pools,
        )
        with ExitStack() as stack:
            stack.callback(release_row, sample)
            branches = [
                Branch(conditioning=conditioning, slot=self._slot(request, sample, pools))
                for conditioning in told
            ]
            stack.pop_all()
        guidance = self.guidance(self.guidance_scale(request))
        return Row(sample=sample, branches=branches, guidance=guidance)

    def decode(self, sample: Tensor, request: PictureRequest) -> Tensor:
        """The picture of finished latents, `[3, height, width]` in 0..1, float32."""
        return decode_latents(self.vae, self.to_latents(sample, request))

    @abstractmethod
    def encode(self, prompt: str, *, is_negative: bool) -> EncodedText:
        """A prompt as the model's arguments."""

    def conditioning(self, text: EncodedText, request: PictureRequest) -> Conditioning:
        """All that a branch is told beside latents and time."""
        return Conditioning(rows=text)

    def latent_shape(self, request: PictureRequest) -> tuple[int, ...]:
        """The latents' channels, height and width."""
        downscale = downscale_of(self.vae)
        channels = self.model.config.in_channels
        return channels, request.height // downscale, request.width // downscale

    def to_sample(self, latents_CHW: Tensor) -> Tensor:
        """Latents as the model takes them."""
        return latents_CHW

    def to_latents(self, sample: Tensor, request: PictureRequest) -> Tensor:
        """The inverse of `to_sample`."""
        return sample

    def spacing(self, request: PictureRequest) -> Spacing:
        """Where the steps lie."""
        return Spacing(num_steps=self.num_steps(request))

    def is_guided(self, scale: float) -> bool:
        """Whether a second branch is asked at this guidance scale."""
        return scale > 1

    def guidance(self, scale: float) -> Guidance:
        """How branches become one."""
        return Guidance(scale=scale)

    def num_steps(self, request: PictureRequest) -> int:
        """Steps as the request counts them: some samplers ask the model more than once in one."""
        return self.default_steps if request.num_steps is None else request.num_steps

    def guidance_scale(self, request: PictureRequest) -> float:
        """How strongly the prompt acts."""
        given = request.guidance_scale
        return self.default_guidance if given is None else given

    def check(self, request: PictureRequest) -> None:
        """Raises `InvalidRequest` for a size the model cannot draw."""
        multiple = self.pixel_multiple
        if request.width % multiple or request.height % multiple:
            raise InvalidRequest(
                f"Width and height must be multiples of {multiple} for this model, not "
                f"{request.width}x{request.height}.",
                param="size",
            )

    def _slot(
        self, request: PictureRequest, sample: SampleRow, pools: CellPools
    ) -> CacheSlot | None:
        if request.cache is None:
            return None
        return CacheSlot(request.cache, len(sample.timesteps), pools)


def row_seed(seed: int, sample_index: int) -> int:
    """The generator's seed of one of the pictures asked for together; the first has the seed's."""
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
