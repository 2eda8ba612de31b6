"""What the images API answers: pictures, their usage, and the events of a stream.

Owns the shapes, which are OpenAI's where it has them, and what is counted as usage.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel

from triptych.modalities.diffusion.api.files import PictureKind
from triptych.modalities.diffusion.api.service import PIXELS_PER_TOKEN
from triptych.modalities.diffusion.wire import ImageRequest

Route = Literal["image_generation", "image_edit"]
"""What the events of a stream begin with."""
KnownQuality = Literal["low", "medium", "high"]


class TokenDetails(BaseModel):
    """Tokens of words and of pictures."""

    text_tokens: int
    image_tokens: int


class ImageUsage(BaseModel):
    """What was read and drawn. A token of a picture stands for 16 x 16 pixels of it."""

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
        num_pictures: int,
        *,
        has_input: bool = True,
    ) -> Self:
        """The usage of `num_pictures` of a request's pictures, with or without what was read."""
        read = sum(_tokens(source.width, source.height) for source in request.sources)
        if not has_input:
            read = num_prompt_tokens = 0
        drawn = num_pictures * _tokens(request.width, request.height)
        return cls(
            input_tokens=num_prompt_tokens + read,
            input_tokens_details=TokenDetails(text_tokens=num_prompt_tokens, image_tokens=read),
            output_tokens=drawn,
            output_tokens_details=TokenDetails(text_tokens=0, image_tokens=drawn),
            total_tokens=num_prompt_tokens + read + drawn,
        )


class PictureData(BaseModel):
    """One picture: its file in base64, or a link to it."""

    b64_json: str | None = None
    url: str | None = None


class ImagesReply(BaseModel):
    """The whole answer. `seed` and `prompt_truncated` are not OpenAI's fields.

    `seed` draws the same pictures again; with `prompt_truncated` a prompt's end was not read.
    """

    created: int
    data: list[PictureData]
    background: Literal["opaque"]
    output_format: PictureKind
    quality: KnownQuality
    size: str
    seed: int
    usage: ImageUsage
    prompt_truncated: bool


class _PictureEvent(BaseModel):
    """What both events with a picture say of it. `index` counts the pictures of one answer."""

    type: str
    b64_json: str
    background: Literal["opaque"]
    created_at: int
    output_format: PictureKind
    quality: KnownQuality
    size: str
    index: int


class PartialImage(_PictureEvent):
    """A preview; the first has the index 0."""

    partial_image_index: int


class CompletedImage(_PictureEvent):
    """A finished picture. What was read is counted with the first to be finished."""

    usage: ImageUsage
    seed: int
    prompt_truncated: bool


class ImageProgress(BaseModel):
    """Where a picture stands: not one of OpenAI's events.

    `step` of `num_steps` steps are done, `num_computed` of them by a run of the model; the last
    took `step_s` seconds. `queue_position` calls are before it; -1: it is being drawn.
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
