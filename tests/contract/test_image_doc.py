"""docs/http_images.md lists every field of the images API, honoured or refused, and every event."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from triptych.core.media.images import ImageLimits
from triptych.modalities.diffusion.api import service
from triptych.modalities.diffusion.api.protocol import (
    REFUSED,
    CacheFields,
    EditFields,
    GenerationBody,
    LoraUse,
    VariationFields,
)
from triptych.modalities.diffusion.api.replies import (
    CompletedImage,
    ImageData,
    ImageProgress,
    ImagesReply,
    PartialImage,
    Route,
)

PAGE = (Path(__file__).parents[2] / "docs" / "http_images.md").read_text(encoding="utf-8")


def test_every_field_is_named() -> None:
    for model in (GenerationBody, EditFields, VariationFields, CacheFields, LoraUse):
        for name in model.model_fields:
            assert f"`{name}`" in PAGE
    for name in (*REFUSED, "num_inference_steps", "guidance_scale", "image[]", "mask"):
        assert f"`{name}`" in PAGE


def test_what_comes_back_is_named() -> None:
    for model in (CompletedImage, ImageProgress, ImagesReply, PartialImage, ImageData):
        for name in model.model_fields:
            assert f"`{name}`" in PAGE
    for event in ("partial_image", "completed", "progress"):
        assert f"`image_generation.{event}`" in PAGE
    for route in get_args(Route):
        assert f"`{route}." in PAGE


def test_limits_are_those_of_the_code() -> None:
    limits = ImageLimits()
    assert f"sides of {limits.min_side} to {limits.max_side} pixels" in PAGE
    assert f"{limits.max_pixels / 1e6:g} million" in PAGE
    assert f"{limits.max_bytes // 2**20} MiB" in PAGE
    assert f"{service.MAX_PROMPT_CHARS:,} characters" in PAGE
    assert f"1 to {service.MAX_STEPS}," in PAGE
    assert f"0 to {service.MAX_GUIDANCE:g}:" in PAGE
