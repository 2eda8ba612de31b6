"""Plans and results of generating images step by step. Plain data, no tensors.

Owns the hand-over between the scheduler (`scheduling`) and the runner (`engine`). An image is
encoded (its prompts, source images and noise), denoised a step at a time, and decoded. Each of
these is a step on the timeline, shared by any number of images. Some models write tokens of the
image before, a few in each step.

Steps that a cache is known to skip cost next to nothing, so one plan covers them together with
the next step that computes; both sides know the number of steps beforehand. If other work waits,
a step of two guidance branches may be split between two plans: the first evaluates one branch,
the second evaluates the other and takes the step.
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
    """An image to begin."""

    key: ImageKey
    request: ImageRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRow:
    """One image's part of a step.

    Denoising takes `num_steps` steps, of which all but the last are known to be skipped. With
    `has_preview` the last one yields a preview of the finished image. With `evaluates_ahead` all
    are known to be skipped, and one guidance branch of the step after them is evaluated. Writing
    adds `num_tokens` tokens.
    """

    key: ImageKey
    num_steps: int = 0
    has_preview: bool = False
    evaluates_ahead: bool = False
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisePlan(Plan):
    """One step of some images; `kind` is `encode`, `write`, `denoise`, `decode` or `release`.

    `dropped` are images that are no longer needed: the runner releases them first, and a plan may
    hold nothing else. `starts` are the rows of `encode`. The runner releases decoded images
    itself.
    """

    rows: tuple[ImageRow, ...] = ()
    starts: tuple[ImageStart, ...] = ()
    dropped: tuple[ImageKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSteps:
    """Step schedule of an image, known once it is encoded.

    `num_rows`: for each step, how many guidance branches may run the model; 0 where every branch
    is known to skip the step. `first_step` is above 0 for an image that begins from another.
    `num_tokens` of the image are written by a language model before the first step.
    """

    num_rows: tuple[int, ...]
    first_step: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    is_prompt_cut: bool = False

    @property
    def num_steps(self) -> int:
        """The number of all steps, those before `first_step` included."""
        return len(self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRowResult:
    """Result of one step for one image, in plan order (of `starts`, for `encode`).

    `num_computed` of the steps taken ran the model, for `num_rows` guidance branches in total.
    `pixels` are a preview or the image; `layers`, the lowest first, are those that make it. Of an
    image that `is_interrupted` no later step is taken. An `error` ends only this image's job.
    """

    planned: PlannedSteps | None = None
    num_computed: int = 0
    num_rows: int = 0
    pixels: Pixels | None = None
    layers: tuple[Pixels, ...] = ()
    is_interrupted: bool = False
    error: TriptychError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """The cost of generating one image.

    Bytes held between steps; tokens (or latent pixels) that pass through the model for one guidance
    branch; pixels to decode.
    """

    state_bytes: int
    num_tokens: int
    num_pixels: int
