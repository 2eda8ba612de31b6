"""Image requests and deltas between API and engine.

Owns the wire types of image generation. Images cross as raw RGB, eight bits per channel, row by
row: the API process decodes and encodes files.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.core.engine_api.pixels import Pixels

CacheName = Literal["auto", "off", "planned", "teacache", "first-block", "taylorseer", "magcache"]
ImageFinish = Literal["stop", "cancelled"]
AUTO = -1
"""A width or height not chosen yet."""


class StepCache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The step cache of an image. `None` or empty fields take the method's defaults.

    `auto` takes the model's calibrated plan if there is one, else computes every step.
    `threshold` belongs to TeaCache, FBCache and MagCache, `coefficients` to TeaCache (highest power
    first), `interval`, `order`, `warmup` and `by_step` to TaylorSeer (`order` also to FBCache),
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
    """A LoRA adapter of the server, and its scale."""

    name: str
    scale: float = 1.0


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate"):
    """`num_images` images of one prompt. `None` or empty fields take the model's defaults.

    The API's service fills in `width` and `height` (`AUTO`: the model's default, or the aspect of
    the first image), `seed` (`None`: random), `sources` and `mask`. `sources` are images to begin
    from or to refer to. Of the first, `mask` (height x width bytes, 255 where it may change; empty:
    everywhere) and `strength` (0 keeps it, 1 regenerates it) say what may change. A model that
    takes an image apart makes `num_layers` of it. `num_partials` previews of each image are sent,
    and with `has_progress` a delta for each step.
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
    num_layers: int | None = None
    num_partials: int = 0
    has_progress: bool = False
    tenant: str = ""


class ImageDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="image"):
    """Progress of one image of a job after one step.

    `step` steps of `num_steps` are done, `num_computed` of them by a run of the model. `pixels`
    are a preview if `partial_index` is 0 or more, else the finished image, which `layers` make, the
    lowest first, if the model makes them. `queue_position` is the
    number of jobs ahead while the job waits, -1 once it runs. `is_prompt_cut`: the text encoders
    did not read all of a prompt. The job's last delta has a `finish_reason`.
    """

    image: int = 0
    step: int = 0
    num_steps: int = 0
    num_computed: int = 0
    pixels: Pixels | None = None
    layers: tuple[Pixels, ...] = ()
    partial_index: int = -1
    queue_position: int = -1
    num_prompt_tokens: int = 0
    is_prompt_cut: bool = False
    finish_reason: ImageFinish | None = None
