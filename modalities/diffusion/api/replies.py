"""Replies of the images API: images, their usage, and the events of a stream.

Owns their fields, which are OpenAI's where it has them, and how usage is counted.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel

from triptych.modalities.diffusion.api.files import ImageKind
from triptych.modalities.diffusion.api.service import PIXELS_PER_TOKEN
from triptych.modalities.diffusion.wire import ImageRequest

Route = Literal["image_generation", "image_edit"]
"""The prefix of a stream's event names."""
KnownQuality = Literal["low", "medium", "high"]


class TokenDetails(BaseModel):
    """Tokens of text and of images."""

    text_tokens: int
    image_tokens: int


class ImageUsage(BaseModel):
    """Tokens read and generated. An image token stands for 16 x 16 pixels."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: TokenDetails
    total_tokens: int

    @classmethod
    def of(
        cls,
        request: ImageRequest,
        num_prompt_tokens: int,
        num_images: int,
        *,
        has_input: bool = True,
    ) -> Self:
        """The usage of `num_images` of a request's images; input tokens only with `has_input`."""
        read = sum(_tokens(source.width, source.height) for source in request.sources)
        if not has_input:
            read = num_prompt_tokens = 0
        generated = num_images * _tokens(request.width, request.height)
        return cls(
            input_tokens=num_prompt_tokens + read,
            input_tokens_details=TokenDetails(text_tokens=num_prompt_tokens, image_tokens=read),
            output_tokens=generated,
            output_tokens_details=TokenDetails(text_tokens=0, image_tokens=generated),
            total_tokens=num_prompt_tokens + read + generated,
        )


class LayerData(BaseModel):
    """One file: in base64, or a link."""

    b64_json: str | None = None
    url: str | None = None


class ImageData(LayerData):
    """One image; `layers`, the lowest first, are those that make it, if the model makes any."""

    layers: list[LayerData] = []


class ImagesReply(BaseModel):
    """The whole reply. `seed` and `prompt_truncated` are not OpenAI's fields.

    `seed` generates the same images again; `prompt_truncated`: a prompt's end was not read.
    """

    created: int
    data: list[ImageData]
    background: Literal["opaque", "transparent"]
    output_format: ImageKind
    quality: KnownQuality
    size: str
    seed: int
    usage: ImageUsage
    prompt_truncated: bool


class _ImageEvent(BaseModel):
    """Fields of both events with an image. `index` counts the images of one reply."""

    type: str
    b64_json: str
    background: Literal["opaque", "transparent"]
    created_at: int
    output_format: ImageKind
    quality: KnownQuality
    size: str
    index: int


class PartialImage(_ImageEvent):
    """A preview; the first has index 0."""

    partial_image_index: int


class CompletedImage(_ImageEvent):
    """A finished image. Input tokens are counted with the first image to finish."""

    usage: ImageUsage
    seed: int
    prompt_truncated: bool
    layers: list[LayerData] = []


class ImageProgress(BaseModel):
    """Progress of an image: not one of OpenAI's events.

    `step` of `num_steps` steps are done, `num_computed` of them by a run of the model; the last
    took `step_s` seconds. `queue_position` calls are ahead of it; -1 during generation.
    """

    type: str
    index: int
    step: int
    num_steps: int
    num_computed: int
    step_s: float
    queue_position: int


def _tokens(width: int, height: int) -> int:
    return math.ceil(width * height / PIXELS_PER_TOKEN)
