"""The words image models speak between API and engine: requests, and their deltas.

Owns the wire types of generating. Images cross as raw RGB, eight bits a channel, row by row: files
are read and written on the API's side, pixels are made on the engine's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.engine_api.pixels import Pixels

CacheName = Literal["auto", "off", "planned", "teacache", "first-block", "taylorseer", "magcache"]
ImageFinish = Literal["stop", "cancelled"]
AUTO = -1
"""A width or height that is not chosen yet."""


class StepCache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which step cache an image is generated with. What is `None` or empty is the method's default.

    `auto` takes the model's calibrated plan where there is one, else computes every step.
    `threshold` belongs to TeaCache, FBCache and MagCache, `coefficients` to TeaCache (highest power
    first), `interval`, `order`, `warmup` and `by_step` to TaylorSeer (`order` to FBCache, too),
    `num_computed` (steps that compute) to plans.
    """

    name: CacheName = "auto"
    threshold: float | None = None
    coefficients: tuple[float, ...] = ()
    interval: int | None = None
    order: int | None = None
    warmup: int | None = None
    by_step: bool = False
    max_skips: int | None = None
    num_computed: int | None = None


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA the server knows by this name, and how strongly it acts."""

    name: str
    scale: float = 1.0


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="draw"):
    """`num_images` images of one prompt. What is `None` or empty is the model's own default.

    The API's service fills in `width` and `height` (`AUTO`: the model's own, or in the shape of
    the first image), `seed` (`None`: a random one), `sources` and `mask`; the engine gets all of
    them. `sources` are images to begin from or to refer to; `mask` (height x width bytes of the
    first one, 255 where it is to change, empty: everywhere) and `strength` (0 keeps it, 1
    regenerates it) say what of it may change. `num_partials` previews of each image are sent on the
    way, and a delta for each step where `has_progress`.
    """

    prompt: str = ""
    negative_prompt: str = ""
    width: int = AUTO
    height: int = AUTO
    seed: int | None = None
    num_images: int = 1
    num_steps: int | None = None
    guidance_scale: float | None = None
    sampler: str = ""
    cache: StepCache = StepCache()
    adapters: tuple[AdapterUse, ...] = ()
    sources: tuple[Pixels, ...] = ()
    mask: bytes = b""
    strength: float | None = None
    num_partials: int = 0
    has_progress: bool = False
    tenant: str = ""


class ImageDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="image"):
    """What one step added to one image of a job.

    `step` steps of `num_steps` are done, `num_computed` of them by a run of the model. `pixels`
    hold a preview where `partial_index` is 0 or more, else the finished image. While a job waits
    its deltas have a `queue_position` (jobs before it, -1 once it runs). `is_prompt_cut`
    where the text encoders did not read all of a prompt. The job's last delta has a
    `finish_reason`.
    """

    image: int = 0
    step: int = 0
    num_steps: int = 0
    num_computed: int = 0
    pixels: Pixels | None = None
    partial_index: int = -1
    queue_position: int = -1
    num_prompt_tokens: int = 0
    is_prompt_cut: bool = False
    finish_reason: ImageFinish | None = None
