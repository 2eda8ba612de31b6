"""What a pipeline does around the denoise loop: `prepare` a row of a request, `decode` a row.

Owns the order of events, which is every pipeline's, and seeds. What differs is in `packed.py` and
`spatial.py`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
from triptych.modalities.diffusion.samplers.rows import start_row


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

    def prepare(self, request: PictureRequest, pools: CellPools) -> Row:
        """A row at its first step. Raises `InvalidRequest` for a size the model cannot draw."""
        self._check(request)
        scale = self._scale(request)
        generator = torch.Generator().manual_seed(row_seed(request.seed, request.sample_index))
        noise = torch.randn((1, *self.latent_shape(request)), generator=generator)[0]
        sample = start_row(
            self.to_sample(noise).to(self.model.device),
            self.components["scheduler"],
            self.spacing(request),
            generator=generator,
            pools=pools,
        )
        prompts = [request.prompt]
        if self.is_guided(scale):
            prompts.append(request.negative_prompt)
        branches = []
        for index, prompt in enumerate(prompts):
            rows = self.encode(prompt, is_negative=index == 1)
            conditioning = self.conditioning(rows, request)
            num_steps = len(sample.timesteps)
            slot = CacheSlot(request.cache, num_steps, pools) if request.cache else None
            branches.append(Branch(conditioning=conditioning, slot=slot))
        return Row(sample=sample, branches=branches, guidance=self.guidance(scale))

    def decode(self, sample: Tensor, request: PictureRequest) -> Tensor:
        """The picture of finished latents, `[3, height, width]` in 0..1, float32."""
        return decode_latents(self.vae, self.to_latents(sample, request))

    @abstractmethod
    def encode(self, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        """A prompt as the model's arguments."""

    def conditioning(self, text: dict[str, Tensor], request: PictureRequest) -> Conditioning:
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
        return Spacing(num_steps=self._num_steps(request))

    def is_guided(self, scale: float) -> bool:
        """Whether a second branch is asked at this guidance scale."""
        return scale > 1

    def guidance(self, scale: float) -> Guidance:
        """How branches become one."""
        return Guidance(scale=scale)

    def _num_steps(self, request: PictureRequest) -> int:
        return self.default_steps if request.num_steps is None else request.num_steps

    def _scale(self, request: PictureRequest) -> float:
        given = request.guidance_scale
        return self.default_guidance if given is None else given

    def _check(self, request: PictureRequest) -> None:
        multiple = self.pixel_multiple
        if request.width % multiple or request.height % multiple:
            raise InvalidRequest(
                f"Width and height must be multiples of {multiple} for this model, not "
                f"{request.width}x{request.height}.",
                param="size",
            )


def row_seed(seed: int, sample_index: int) -> int:
    """The generator's seed of one of the pictures asked for together; the first has the seed's."""
    if sample_index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
