"""Estimates of the device memory of generation: state, activations of a run, decoding.

Owns the estimates, from shapes alone; each errs on the large side. Knows no ledger and no policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from triptych.core.engine_api.pixels import Pixels
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level
from triptych.modalities.diffusion.engine.loading.outline import LIVE_WIDTHS
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.plan import ImageCost
from triptych.modalities.diffusion.spec import size_within
from triptych.modalities.diffusion.wire import ImageRequest

_FLOAT_BYTES = 4
_NUM_STATES = 5  # a third-order sampler: the sample, its outputs, the start of a step
_SPARE = 2  # pools double when they grow
_LIVE_CHANNELS = 4  # of a decoder's widest full-size layer: input, output, norm, workspace
_KEPT_OF_MASK = 5  # in latents: image, mask and noise; of FLUX.1 Fill image and pixels of the mask
_SEEN_RATIO = 4 / 3  # sides are rounded: this is the most pixels over those of a square
_LONG_PROMPT = f'"{"a " * 2048}"'  # some recipes encode what is quoted apart


@dataclass(frozen=True, slots=True)
class GenerationCosts:
    """Costs of one model.

    `text_bytes`: the most one encoded prompt takes, with an image if the model needs one.
    `seen_bytes`: what each further image adds. `encode_bytes`: activations of encoding one longest
    prompt with all images.
    """

    recipe: Recipe
    text_bytes: int
    seen_bytes: int = 0
    encode_bytes: int = 0

    @classmethod
    def of(cls, recipe: Recipe) -> GenerationCosts:
        """Measure the bytes by encoding a longest prompt: configurations do not state them."""
        own, spec = own_request(recipe), recipe.spec
        text_bytes, encode_bytes = _text_bytes(recipe, own), _live_bytes(recipe)
        num_further = spec.max_references - len(own.sources)
        if not num_further:
            return cls(recipe, text_bytes, encode_bytes=encode_bytes)
        seeing = replace(own, sources=(*own.sources, _grey(own.width, own.height)))
        seen_bytes = _SEEN_RATIO * (_text_bytes(recipe, seeing) - text_bytes)
        encode_bytes += num_further * math.ceil(_SEEN_RATIO * (_live_bytes(recipe) - encode_bytes))
        return cls(recipe, text_bytes, math.ceil(seen_bytes), encode_bytes)

    def of_image(self, request: ImageRequest, cache: CacheMethod | None = None) -> ImageCost:
        """The cost of one image of a request, for the scheduler."""
        num_references = len(request.sources) if self.recipe.spec.max_references else 0
        num_tokens = request.width * request.height // self.recipe.token_side**2
        num_tokens *= self.recipe.num_frames(request)
        num_tokens += self.recipe.num_reference_tokens(request)
        latent_bytes = math.prod(self.recipe.latent_shape(request)) * _FLOAT_BYTES
        num_branches = len(self.recipe.prompts(request))
        num_further = max(0, num_references - self.recipe.spec.needs_reference)
        text_bytes = self.text_bytes + num_further * self.seen_bytes
        cached = self._cached_bytes(cache, latent_bytes, num_tokens)
        kept = _KEPT_OF_MASK * latent_bytes if request.mask else 0
        kept += (num_branches - 1) * latent_bytes  # the velocity of the branch that ran ahead
        cells = _SPARE * (_NUM_STATES * latent_bytes + num_branches * cached)
        return ImageCost(
            state_bytes=cells + kept + num_branches * text_bytes + self.recipe.kept_bytes(request),
            num_tokens=num_tokens,
            num_pixels=request.width * request.height,
        )

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes of activations of a model run, per row."""
        model = self.recipe.model
        return num_tokens * LIVE_WIDTHS * width_of(model.config) * int(model.dtype.itemsize)

    def decode_bytes(self, num_pixels: int) -> int:
        """Bytes of activations of the autoencoder, for an image decoded as a whole."""
        vae = self.recipe.vae
        item_bytes = int(vae.dtype.itemsize)
        return num_pixels * _LIVE_CHANNELS * _full_size_channels(vae.config) * item_bytes

    def _cached_bytes(self, method: CacheMethod | None, latent_bytes: int, num_tokens: int) -> int:
        """Bytes that one branch's cache keeps: outputs, and the signal of a cache that probes."""
        if method is None:
            return 0
        num_kept = method.extrapolator.num_kept
        if method.level is Level.VELOCITY:
            return num_kept * latent_bytes
        model = self.recipe.model
        return (num_kept + 1) * num_tokens * width_of(model.config) * int(model.dtype.itemsize)


def own_request(recipe: Recipe, max_pixels: int | None = None) -> ImageRequest:
    """A request with a long prompt for an image of the default size.

    With `max_pixels`, a larger default size is scaled down to that many pixels.
    """
    size = recipe.default_size
    if max_pixels is not None:
        size = size_within(size, max_pixels, recipe.pixel_multiple)
    width, height = size
    sources = (_grey(width, height),) if recipe.spec.needs_reference else ()
    return ImageRequest(prompt=_LONG_PROMPT, width=width, height=height, sources=sources)


def _grey(width: int, height: int) -> Pixels:
    return Pixels(width=width, height=height, rgb=b"\x80" * (3 * width * height))


def _text_bytes(recipe: Recipe, request: ImageRequest) -> int:
    """The bytes of the request's first prompt, encoded."""
    (text,) = recipe.encode_all(recipe.prompts(request)[:1])
    return sum(tensor.nbytes for tensor in text.values())


def _live_bytes(recipe: Recipe) -> int:
    """The most that an encoder held in its latest run, if the recipe has outlines of encoders.

    A language model that writes tokens of images reads the prompt as well.
    """
    parts = (getattr(part, "live_bytes", 0) for part in recipe.components.values())
    return max(recipe.live_bytes, *parts)


def width_of(config: Any) -> int:
    """Width of a denoising model's hidden states, from its configuration.

    Of a UNet at full resolution, where the skip connection doubles it.
    """
    if config.get("block_out_channels"):
        return 2 * int(config["block_out_channels"][0])
    heads = config.get("num_attention_heads") or config.get("n_heads")
    size = config.get("attention_head_dim")
    if isinstance(heads, int) and isinstance(size, int):
        return heads * size
    return int(config.get("hidden_size") or config.get("dim") or 4096)


def _full_size_channels(config: Any) -> int:
    """The width of a decoder's widest full-resolution layer."""
    channels = config.get("decoder_block_out_channels") or config.get("block_out_channels")
    if channels:
        return int(max(channels[:2]))
    base = config.get("decoder_base_dim") or config["base_dim"]
    return int(base * max(config["dim_mult"][:2]))
