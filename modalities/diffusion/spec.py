"""The capabilities and published defaults of each diffusers pipeline class.

Owns the table by class name (steps, guidance, size, images, negative prompt), the exceptions that a
model's files state, the arithmetic of strengths and sizes, and the check of a request's images. API
and engine share it, so it imports no torch. Opens no file: the contents of JSON files are
arguments, as mappings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.unserved import reason_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """Facts of a pipeline class.

    `default_steps`, `default_guidance` and `default_strength` apply if the request has none.
    `patch`: latents that divide a side: those of a patch, or more. `size`: the default width and
    height; `None` for the model's `sample_size`.

    Every pipeline can begin from an image, noised according to the strength, or change only a
    masked part of it. `max_references`: how many reference images it takes; the first may also be
    begun from. `needs_reference`: it cannot generate without one; `needs_mask`: without an image
    and a mask. With a mask or references the default strength is 1. `has_negative`: the pipeline
    takes a negative prompt; otherwise the model takes the guidance scale as an argument, unless
    its configuration says that it ignores it: then it takes a negative prompt, and its default is
    `own_guidance`. `neutral_guidance`: up to this scale the negative prompt has no effect and is
    not run. `rounds_down`: steps times strength are rounded down; otherwise a part of a step
    counts. `has_alpha`: images have an alpha channel. `default_layers`:
    an image is taken apart into so many layers, unless the request has a number.
    """

    default_steps: int
    default_guidance: float
    default_strength: float = 0.6
    patch: int = 2
    size: tuple[int, int] | None = (1024, 1024)
    max_references: int = 0
    needs_reference: bool = False
    needs_mask: bool = False
    has_negative: bool = True
    own_guidance: float = 1.0
    neutral_guidance: float = 1.0
    rounds_down: bool = False
    has_alpha: bool = False
    default_layers: int = 0

    @property
    def max_images(self) -> int:
        """How many images a request may have."""
        return max(1, self.max_references)

    def is_guided(self, scale: float) -> bool:
        """Whether the negative branch is evaluated at this guidance scale."""
        return self.has_negative and scale > self.neutral_guidance

    def strength_of(self, given: float | None, *, has_mask: bool) -> float:
        """How far a source image is changed: 0 keeps it, 1 regenerates it."""
        if given is not None:
            return given
        return 1.0 if has_mask or self.max_references else self.default_strength

    def num_layers(self, given: int | None) -> int:
        """The number of layers; 0 of a model that makes none."""
        return self.default_layers if given is None else given

    def first_step(self, num_steps: int, strength: float) -> int:
        """The first step with a source image, rounded as diffusers' pipeline does."""
        if self.rounds_down:
            return num_steps - int(num_steps * strength)
        return int(num_steps - num_steps * strength)

    def check_images(
        self, num_images: int, *, num_steps: int, strength: float | None, has_mask: bool
    ) -> None:
        """Raise `InvalidRequest` for images, a mask or a strength that cannot be used."""
        if self.needs_reference and not num_images:
            raise InvalidRequest("This model edits images: send one.", param="image")
        if self.needs_mask and not has_mask:
            raise InvalidRequest(
                "This model fills the masked part of an image: send an image and a mask.",
                param="mask" if num_images else "image",
            )
        if num_images > self.max_images:
            raise InvalidRequest(
                f"{num_images} images are too many: this model takes at most {self.max_images}.",
                param="image",
            )
        if (has_mask or strength is not None) and not num_images:
            name = "mask" if has_mask else "strength"
            raise InvalidRequest(f"A {name} needs an image to begin from.", param=name)
        amount = self.strength_of(strength, has_mask=has_mask)
        is_usable = 0 <= amount <= 1 and self.first_step(num_steps, amount) < num_steps
        if num_images and not is_usable:
            raise InvalidRequest(
                f"Strength {amount:g} must be between 0 and 1, and leave at least one of"
                f" {num_steps} steps.",
                param="strength",
            )

    def pixel_multiple(self, vae: Mapping[str, Any]) -> int:
        """The number that divides width and height. `vae`: the autoencoder's config.json."""
        return downscale(vae) * self.patch

    def default_size(
        self, model: Mapping[str, Any], vae: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> tuple[int, int]:
        """The width and height in pixels that the model generates best.

        `model`: the config.json of the transformer or UNet. `facts`: plain entries of
        model_index.json; `default_size` is the side of a model that differs from its class.
        """
        if own := facts.get("default_size"):
            return int(own), int(own)
        if self.size is not None:
            return self.size
        latents = model.get("sample_size") or 128
        height, width = latents if isinstance(latents, list | tuple) else (latents, latents)
        return int(width) * downscale(vae), int(height) * downscale(vae)


def size_within(size: tuple[int, int], max_pixels: int, multiple: int) -> tuple[int, int]:
    """Scale a size to at most `max_pixels`, with sides that are multiples of `multiple`."""
    width, height = size
    if width * height <= max_pixels:
        return size
    scale = math.sqrt(max_pixels / (width * height)) / multiple
    return max(1, int(width * scale)) * multiple, max(1, int(height * scale)) * multiple


def downscale(vae: Mapping[str, Any]) -> int:
    """Pixels per latent along a side, from the autoencoder's config.json."""
    if "temperal_downsample" in vae:
        return int(2 ** len(vae["temperal_downsample"]))
    channels = vae.get("encoder_block_out_channels") or vae["block_out_channels"]
    return int(2 ** (len(channels) - 1))


_CHANGES = re.compile("Img2Img|Inpaint")
_OF_OTHER_WEIGHTS = frozenset(
    {
        "StableDiffusionInpaintPipeline",
        "StableDiffusionXLImg2ImgPipeline",  # of SDXL's refiner
        "StableDiffusionXLInpaintPipeline",
    }
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_LUMINA2 = PipelineSpec(default_steps=30, default_guidance=4.0, size=None)
_QWEN = PipelineSpec(default_steps=50, default_guidance=4.0)
_LONGCAT = PipelineSpec(default_steps=50, default_guidance=4.5)
_FLUX = PipelineSpec(default_steps=28, default_guidance=3.5, has_negative=False)

PIPELINES: Mapping[str, PipelineSpec] = MappingProxyType(
    {
        "AuraFlowPipeline": PipelineSpec(default_steps=50, default_guidance=3.5),
        "ChromaPipeline": PipelineSpec(
            default_steps=35, default_guidance=5.0, default_strength=0.9
        ),
        "Flux2KleinPipeline": PipelineSpec(
            default_steps=50, default_guidance=4.0, max_references=10
        ),
        "Flux2Pipeline": PipelineSpec(
            default_steps=50, default_guidance=4.0, max_references=10, has_negative=False
        ),
        "FluxFillPipeline": replace(
            _FLUX, default_steps=50, default_guidance=30.0, default_strength=1.0, needs_mask=True
        ),
        "FluxKontextPipeline": replace(_FLUX, max_references=1),
        "FluxPipeline": _FLUX,
        "ErnieImagePipeline": PipelineSpec(default_steps=50, default_guidance=4.0),
        "GlmImagePipeline": PipelineSpec(default_steps=50, default_guidance=1.5, patch=4),
        "HiDreamImagePipeline": PipelineSpec(default_steps=50, default_guidance=5.0),
        "HunyuanImagePipeline": PipelineSpec(
            default_steps=50,
            default_guidance=3.25,
            patch=1,
            size=(2048, 2048),
            has_negative=False,
            own_guidance=3.5,
        ),
        "LongCatImageEditPipeline": replace(_LONGCAT, max_references=1, needs_reference=True),
        "LongCatImagePipeline": _LONGCAT,
        "Lumina2Pipeline": _LUMINA2,
        "Lumina2Text2ImgPipeline": _LUMINA2,  # its name when the model came out
        "OvisImagePipeline": PipelineSpec(default_steps=50, default_guidance=5.0),
        "PixArtAlphaPipeline": PipelineSpec(
            default_steps=20, default_guidance=4.5, size=None, rounds_down=True
        ),
        "PixArtSigmaPipeline": PipelineSpec(
            default_steps=20, default_guidance=4.5, size=None, rounds_down=True
        ),
        "QwenImage21Pipeline": replace(
            _QWEN, default_steps=40, default_guidance=1.0, max_references=10, has_alpha=True
        ),
        "QwenImageEditPipeline": replace(_QWEN, max_references=1, needs_reference=True),
        "QwenImageEditPlusPipeline": replace(_QWEN, max_references=10, needs_reference=True),
        "QwenImageLayeredPipeline": replace(
            _QWEN,
            max_references=1,
            needs_reference=True,
            size=(640, 640),
            has_alpha=True,
            default_layers=4,
        ),
        "QwenImagePipeline": _QWEN,
        "SanaPipeline": PipelineSpec(default_steps=20, default_guidance=4.5, patch=1, size=None),
        "SanaSprintPipeline": PipelineSpec(
            default_steps=2, default_guidance=4.5, patch=1, size=None, has_negative=False
        ),
        "StableDiffusion3Pipeline": PipelineSpec(default_steps=28, default_guidance=7.0, size=None),
        "StableDiffusionPipeline": PipelineSpec(
            default_steps=50,
            default_guidance=7.5,
            default_strength=0.8,
            patch=1,
            size=None,
            rounds_down=True,
        ),
        "StableDiffusionXLPipeline": PipelineSpec(
            default_steps=50,
            default_guidance=5.0,
            default_strength=0.3,
            patch=1,
            size=None,
            rounds_down=True,
        ),
        "WanPipeline": PipelineSpec(
            default_steps=50,
            default_guidance=5.0,
            default_strength=0.8,
            size=(832, 480),
            rounds_down=True,
        ),
        "ZImagePipeline": PipelineSpec(
            default_steps=50, default_guidance=5.0, neutral_guidance=0.0
        ),
    }
)


def served_name(pipeline: str) -> str:
    """The class in `PIPELINES` with the weights of one that changes images; else the same name."""
    plain = _CHANGES.sub("", pipeline)
    return plain if plain in PIPELINES and pipeline not in _OF_OTHER_WEIGHTS else pipeline


def spec_of(
    pipeline: str, model: Mapping[str, Any] = _NOTHING, facts: Mapping[str, Any] = _NOTHING
) -> PipelineSpec:
    """The spec of a pipeline class, by its name. Raises `WeightsError` if it is unknown.

    `model`: the config.json of the transformer or UNet. `facts`: plain entries of model_index.json;
    `default_steps` and `default_guidance` are those of a model that differs from its class, and
    `sample_sigmas` its noise levels, one for each step.

    Some models of a guidance-distilled class ignore the scale, such as FLUX.1 schnell: for them a
    scale above 1 means classifier-free guidance, and the default is none. A distilled model of a
    class with two branches has only one.
    """
    name = served_name(pipeline)
    if name not in PIPELINES:
        raise WeightsError(f"{name} is not served: {reason_of(name, PIPELINES)}.")
    spec = PIPELINES[name]
    if not spec.has_negative and model.get("guidance_embeds") is False:
        spec = replace(spec, has_negative=True, default_guidance=spec.own_guidance)
    if facts.get("is_distilled"):
        spec = replace(spec, has_negative=False)
    if levels := facts.get("sample_sigmas"):
        spec = replace(spec, default_steps=len(levels))
    own = {name: facts[name] for name in ("default_steps", "default_guidance") if name in facts}
    return replace(spec, **own) if own else spec
