"""Request fields of the OpenAI images API.

Owns the values each field may have. A field is honoured, or refused by name with the alternative;
any other name is an unknown field. The service checks later what a particular model supports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from msgspec.structs import replace
from pydantic import AliasChoices, Discriminator, Field, StringConstraints, Tag, model_validator
from typing_extensions import override

from triptych.core import limits
from triptych.core.errors import InvalidRequest
from triptych.core.http.body import parse_json
from triptych.core.http.fields import (
    Label,
    Name,
    NullIsAbsent,
    RefusedField,
    Refusing,
    Strict,
    TakesModel,
    inert,
    without_refused,
)
from triptych.modalities.diffusion.api.files import ImageKind
from triptych.modalities.diffusion.api.service import (
    MAX_GUIDANCE,
    MAX_IMAGES,
    MAX_LAYERS,
    MAX_PARTIALS,
    MAX_PROMPT_CHARS,
    MAX_STEPS,
    Background,
    Quality,
)
from triptych.modalities.diffusion.wire import AUTO, AdapterUse, CacheName, ImageRequest, StepCache

MAX_ADAPTERS = 8
MAX_SOURCES = 16  # OpenAI's
_MAX_ABS_SCALE = 10
_MAX_COEFFICIENTS = 8
_MAX_COEFFICIENT = 1e6
_QUALITIES: Mapping[str, Quality] = MappingProxyType(
    {
        "auto": "auto",
        "low": "low",
        "medium": "medium",
        "high": "high",
        "standard": "medium",  # this and `hd` belong to retired models
        "hd": "high",
    }
)

_STILL = "images are still; ask for png, jpeg or webp."
_SIZE = RefusedField("send size, as in 1024x768.")
_GUIDANCE = RefusedField("send guidance.")
_LORA = RefusedField("send lora, a list of names and scales.")
_CACHE = RefusedField("send cache, a name or an object.")
REFUSED: Mapping[str, RefusedField] = MappingProxyType(
    {
        "batch_size": RefusedField("send n."),
        "cache_dit_config": _CACHE,
        "cfg_scale": _GUIDANCE,
        "complexity": RefusedField("send quality, or steps."),
        "controlnet": RefusedField("send an image to /v1/images/edits."),
        "enable_teacache": _CACHE,
        "frame_count": RefusedField(_STILL),
        "frame_duration_ms": RefusedField(_STILL),
        "height": _SIZE,
        "input_fidelity": RefusedField("send strength.", ("low",)),
        "loras": _LORA,
        "markup": RefusedField("draw on the image itself, or send a mask."),
        "num_frames": RefusedField(_STILL, (1,)),
        "num_outputs_per_prompt": RefusedField("send n."),
        "scheduler": RefusedField("send sampler."),
        "step": RefusedField("send steps."),
        "style": RefusedField("describe it in the prompt."),
        "svg": RefusedField("images are made of pixels; ask for png, jpeg or webp."),
        "teacache_params": _CACHE,
        "true_cfg_scale": _GUIDANCE,
        "width": _SIZE,
    }
)
"""Fields of other models and servers, with the alternative to each."""
_FOR_IMAGES = RefusedField("it is for /v1/images/edits.")
_ONLY_FOR_EDITS: Mapping[str, RefusedField] = MappingProxyType(
    dict.fromkeys(("image", "image[]", "layers", "mask", "strength"), _FOR_IMAGES)
)

_TWICE_NAMED: Mapping[str, str] = MappingProxyType(
    {"guidance": "guidance_scale", "steps": "num_inference_steps"}
)
_SIZES = r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$"
_FOLDED = re.compile(r"(cache|lora\[\])\[(\w+)\](\[\])?")
_Strength = Annotated[float, Field(ge=0, le=1)]
_Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class CacheFields(Strict):
    """The step cache and its settings, each for the methods it names."""

    name: CacheName
    threshold: Annotated[float, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="Change from which a step computes: teacache, first-block, magcache",
    )
    coefficients: (
        Annotated[
            tuple[Annotated[float, Field(ge=-_MAX_COEFFICIENT, le=_MAX_COEFFICIENT)], ...],
            Field(max_length=_MAX_COEFFICIENTS, strict=False),
        ]
        | None
    ) = Field(default=None, description="Highest power first: teacache")
    interval: _Steps | None = Field(
        default=None, description="Steps from one computed step to the next: taylorseer"
    )
    order: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None, description="Order of the extrapolation: taylorseer, first-block"
    )
    warmup: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = Field(
        default=None, description="Initial steps that all compute: taylorseer"
    )
    by_step: bool | None = Field(
        default=None, description="Extrapolate by step, not by noise level: taylorseer"
    )
    max_skips: _Steps | None = Field(default=None, description="Most steps skipped in a row")
    num_computed: _Steps | None = Field(
        default=None, description="Most steps that compute: planned"
    )


class LoraUse(Strict):
    """A LoRA adapter of the server, and its scale."""

    name: Name
    scale: Annotated[float, Field(ge=-_MAX_ABS_SCALE, le=_MAX_ABS_SCALE)] = 1.0


def _cache_kind(value: Any) -> str:
    return ":name" if isinstance(value, str) else ":fields"


class GenerationFields(TakesModel):
    """Fields of all three routes."""

    tasks = ("image",)

    model: Name | None = Field(default=None, description="Default: the first image model.")
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    size: Annotated[str, StringConstraints(max_length=11)] = Field(
        default="auto",
        description="auto, or WIDTHxHEIGHT in pixels.",
        json_schema_extra={"pattern": _SIZES},
    )
    quality: Literal["auto", "low", "medium", "high", "standard", "hd"] = Field(
        default="auto",
        description="Number of steps: half the model's (low), all (medium) or 1.5 times (high).",
    )
    background: Background = Field(
        default="auto", description="transparent: only of models that make an alpha channel."
    )
    output_format: ImageKind = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] = Field(
        default=100, description="Quality of jpeg and webp."
    )
    response_format: Literal["url", "b64_json"] = "b64_json"
    moderation: Literal["auto", "low"] | None = inert("moderation")
    user: Label | None = inert("user")
    safety_identifier: Label | None = inert("safety_identifier")
    seed: Annotated[int, Field(ge=-limits.MAX_SEED, le=limits.MAX_SEED)] | None = Field(
        default=None, description="The same seed gives the same image; -1 picks a random one."
    )
    steps: _Steps | None = Field(
        default=None, validation_alias=AliasChoices("steps", "num_inference_steps")
    )
    guidance: Annotated[float, Field(ge=0, le=MAX_GUIDANCE)] | None = Field(
        default=None, validation_alias=AliasChoices("guidance", "guidance_scale")
    )
    negative_prompt: Annotated[str, StringConstraints(max_length=MAX_PROMPT_CHARS)] = ""
    sampler: Annotated[str, StringConstraints(max_length=limits.MAX_NAME_CHARS)] = ""
    cache: Annotated[
        Annotated[CacheName, Tag(":name")] | Annotated[CacheFields, Tag(":fields")],
        Discriminator(_cache_kind),
    ] = "auto"
    lora: Annotated[list[LoraUse], Field(max_length=MAX_ADAPTERS)] = Field(
        default=[], description="LoRA adapters of the server's --lora-paths."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        for name, other in _TWICE_NAMED.items():
            if isinstance(value, dict) and name in value and other in value:
                raise InvalidRequest(f"{name} and {other} are one field: send one.", param=other)
        return without_refused(value, REFUSED)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if not re.fullmatch(_SIZES, self.size):
            raise InvalidRequest(
                "size is auto, or WIDTHxHEIGHT in pixels, as in 1024x768.", param="size"
            )
        if self.background == "transparent" and self.output_format == "jpeg":
            raise InvalidRequest(
                "A jpeg has no transparent background: ask for png or webp.", param="output_format"
            )
        if self.output_format == "png" and self.output_compression != 100:
            raise InvalidRequest(
                "output_compression goes with output_format jpeg or webp.",
                param="output_compression",
            )
        if self.steps is not None and self.quality != "auto":
            raise InvalidRequest(
                "quality chooses the number of steps: send either quality or steps.", param="steps"
            )
        return self

    @property
    def known_quality(self) -> Quality:
        """The quality by its current name."""
        return _QUALITIES[self.quality]

    def request(self) -> ImageRequest:
        """The engine request, without the values that the service fills in."""
        width, height = (AUTO, AUTO) if self.size == "auto" else map(int, self.size.split("x"))
        if isinstance(self.cache, str):
            cache = StepCache(name=self.cache)
        else:
            cache = StepCache(**self.cache.model_dump(exclude_none=True))
        return ImageRequest(
            negative_prompt=self.negative_prompt,
            width=width,
            height=height,
            seed=self.seed,
            num_images=self.n,
            num_steps=self.steps,
            guidance_scale=self.guidance,
            sampler=self.sampler,
            cache=cache,
            adapters=tuple(AdapterUse(use.name, use.scale) for use in self.lora),
        )


class PromptFields(GenerationFields):
    """Fields of the routes that take a prompt."""

    prompt: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PROMPT_CHARS)]
    stream: bool = Field(default=False, description="Send events during generation.")
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIALS)] = Field(
        default=0, description="Previews of each image; needs stream."
    )
    progress: bool = Field(
        default=False, description="Also send events for queue position and steps; needs stream."
    )

    @model_validator(mode="after")
    def _stream_together(self) -> Self:
        for name in ("partial_images", "progress"):
            if getattr(self, name) and not self.stream:
                raise InvalidRequest(f"{name} goes with stream.", param=name)
        if self.stream and self.response_format == "url":
            raise InvalidRequest("Streams send b64_json, not links.", param="response_format")
        return self

    @override
    def request(self) -> ImageRequest:
        return replace(
            super().request(),
            prompt=self.prompt,
            num_partials=self.partial_images,
            has_progress=self.progress,
        )


class GenerationBody(PromptFields, NullIsAbsent, Refusing):
    """Body of `/v1/images/generations`."""

    refused = _ONLY_FOR_EDITS


class SourceFields(GenerationFields):
    """Fields of the routes that take a source image."""

    strength: _Strength | None = Field(default=None, description="How far the image may change.")
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = Field(
        default=None, description="Layers of a model that takes an image apart."
    )

    @override
    def request(self) -> ImageRequest:
        return replace(super().request(), strength=self.strength, num_layers=self.layers)


class _ImageFields(SourceFields):
    """Fields of a form with a source image."""

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, value: Any) -> Any:
        return unfolded(value)


class EditFields(_ImageFields, PromptFields):
    """Fields of `/v1/images/edits`, besides the files `image` (or `image[]`) and `mask`."""


class VariationFields(_ImageFields):
    """Fields of `/v1/images/variations`, besides the file `image`."""


def unfolded(form: Any) -> Any:
    """Parse a form's `cache` and `lora`, which are JSON text or fields like `cache[name]`."""
    if not isinstance(form, dict):
        return form
    fields: dict[str, Any] = {}
    folded: dict[str, dict[str, Any]] = {}  # as OpenAI's clients send objects, part by part
    for name, value in form.items():
        if found := _FOLDED.fullmatch(name):
            parts = folded.setdefault(found[1], {})
            if found[2] in parts:
                raise InvalidRequest(f"Duplicate field {name}.", param=found[1])
            parts[found[2]] = value
        elif name in ("cache", "lora") and value[:1] in ("{", "["):
            fields[name] = parse_json(value.encode())
        else:
            fields[name] = value
    for name, parts in folded.items():
        whole = name.removesuffix("[]")
        if whole in fields:
            raise InvalidRequest(f"Duplicate field {whole}.", param=whole)
        fields[whole] = parts if whole == name else _rows(parts)
    return fields


def _rows(columns: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """The adapters of a form, from its columns of names and of scales."""
    if len({len(column) for column in columns.values()}) > 1:
        raise InvalidRequest(
            "In a form every adapter needs a scale; or send lora as JSON text.",
            param="lora",
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
