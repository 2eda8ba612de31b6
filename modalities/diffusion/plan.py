"""Plan and result of generating images step by step. Plain data, no tensors.

Owns the hand-over between the scheduler (`scheduling`) and the runner (`engine`). An image is
encoded (its text, what it begins from, its noise), denoised a step at a time, and decoded; each of
these is a step on the timeline, of as many images as share it.

Steps that a cache is known to skip cost next to nothing, so a row takes them on its way to the
next one that computes: how far a row gets is the plan's to say, and both sides know it beforehand.
Where others wait, a step of two guidance branches may be shared between two plans: the first asks
one branch ahead, the second asks the other and takes the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Plan
from triptych.core.errors import TriptychError
from triptych.modalities.diffusion.wire import ImageRequest


class ImageKey(NamedTuple):
    """One image of a job, counted from 0."""

    job_id: str
    image: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStart:
    """An image that begins: all that the runner knows of it."""

    key: ImageKey
    request: ImageRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """One image's part of a step.

    Denoising takes `num_steps` steps, of which all but the last are known to be skipped. With
    `has_preview` the finished image is previewed from the last of them. With `asks_ahead` all are
    known to be skipped, and of the step after them one guidance branch is asked.
    """

    key: ImageKey
    num_steps: int = 0
    has_preview: bool = False
    asks_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisePlan(Plan):
    """One step of some images; `kind` is `encode`, `denoise`, `decode` or `release`.

    `dropped` are images that are no longer needed: the runner releases them first, and a plan may
    hold nothing else. `starts` are the rows of `encode`. Decoded images are released by the
    runner itself.
    """

    rows: tuple[ImageRow, ...] = ()
    starts: tuple[ImageStart, ...] = ()
    dropped: tuple[ImageKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSteps:
    """What is known of an image's way once it is encoded.

    `num_rows` are the guidance branches that the model is run for, step by step: 0 where every
    branch is known to be skipped, and as many as may compute where that is decided on the way.
    `first_step` is above 0 for an image that begins from another.
    """

    num_rows: tuple[int, ...]
    first_step: int = 0
    num_prompt_tokens: int = 0
    is_prompt_cut: bool = False

    @property
    def num_steps(self) -> int:
        """Steps of the whole way, those before `first_step` included."""
        return len(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRowResult:
    """What a step yielded of one image, in plan order (of `starts`, for `encode`).

    `num_computed` of the steps taken ran the model, for `num_rows` guidance branches now.
    `pixels` are a preview or the image. An `error` ends the image's job, and no other.
    """

    planned: PlannedSteps | None = None
    num_computed: int = 0
    num_rows: int = 0
    pixels: Pixels | None = None
    error: TriptychError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """What an image takes while it is generated.

    Bytes held between steps; tokens (or latent pixels) that pass through the model for one guidance
    branch; pixels to decode.
    """

    state_bytes: int
    num_tokens: int
    num_pixels: int
