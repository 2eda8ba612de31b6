"""Generates images with one model: recipe, denoise loop, caches and decoder together.

Owns the steps from a wire request to a row, and from a row to pixels. Knows no plan and no queue:
the runner decides what happens when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from triptych.core.errors import TriptychError
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.diffusion.engine.adapters.adapters import Adapters
from triptych.modalities.diffusion.engine.caches.choice import CacheResolver
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.latent_decoder import LatentDecoder
from triptych.modalities.diffusion.engine.prompts import EncodedPrompts, ImagePrompts, PromptCache
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.samplers.rows import clean_samples
from triptych.modalities.diffusion.engine.step_end import install_hook
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools, select_rows
from triptych.modalities.diffusion.step_hook import HookedRequest
from triptych.modalities.diffusion.wire import ImageRequest

P = ParamSpec("P")
Found = TypeVar("Found")


@dataclass(eq=False, slots=True, kw_only=True)
class RunningImage:
    """An image in progress. `release` must be called once, however it ends.

    `num_tokens` and the steps before `step` were reported. Of those, `num_computed` ran the model
    for `num_rows` branches in total. Of the last step: the sum of its velocity (finite only if all
    of it is) at `place` in `sums`, and the requested preview.
    """

    request: ImageRequest
    row: DenoiseRow
    texts: EncodedPrompts
    step: int
    num_tokens: int = 0
    num_computed: int = 0
    num_rows: int = 0
    sums: HostCopy | None = None
    place: int = 0
    preview: HostCopy | None = None

    @property
    def num_runs(self) -> int:
        """The number of steps at which the model ran for any branch."""
        return max(branch.num_runs for branch in self.row.branches)

    @property
    def num_rows_run(self) -> int:
        """The number of model runs, summed over the branches."""
        return sum(branch.num_runs for branch in self.row.branches)

    def release(self) -> None:
        """Release the row, its caches and its prompts."""
        self.row.release()
        self.texts.release()


@dataclass(frozen=True, slots=True)
class _CheckedRequest:
    """A checked request: image `index` of it can be generated."""

    request: ImageRequest
    index: int
    cache: CacheMethod | None
    prompts: ImagePrompts


class ImageExecutor:
    """Generates with one model. All calls come from one thread, except `cache_of`."""

    def __init__(
        self,
        recipe: Recipe,
        denoiser: Denoiser,
        *,
        caches: CacheResolver,
        prompts: PromptCache,
        adapters: Adapters,
        decoder: LatentDecoder,
    ) -> None:
        self.recipe = recipe
        self.pools = TensorPools()
        self._denoiser = denoiser
        self._caches = caches
        self._prompts = prompts
        self.adapters = adapters
        self._decoder = decoder

    def cache_of(self, request: ImageRequest) -> CacheMethod | None:
        """The step cache of a request. Raises `RequestError` if it cannot be generated."""
        self.adapters.check(request.adapters)
        self.recipe.check(request)
        num_steps = self.recipe.num_steps(request)
        return self._caches.method(request.cache, num_steps, request.sampler)

    def begin(
        self, requests: Sequence[tuple[ImageRequest, int]]
    ) -> list[RunningImage | TriptychError]:
        """Encode and prepare one image, by its index, of each request.

        A request that cannot be generated yields its error. If this raises, no image has begun.
        """
        self.pools.trim()  # unused sizes keep no memory
        checked = [_attempt(self._check, *each) for each in requests]
        good = [each for each in checked if isinstance(each, _CheckedRequest)]
        with ExitStack() as stack:
            encoded = self._prompts.acquire([each.prompts for each in good])
            for texts in encoded:
                stack.callback(texts.release)
            begun = iter([self._open(*pair, stack) for pair in zip(good, encoded, strict=True)])
            stack.pop_all()
        return [next(begun) if isinstance(each, _CheckedRequest) else each for each in checked]

    def advance(
        self, images: Sequence[RunningImage], num_steps: Sequence[int], has_preview: Sequence[bool]
    ) -> None:
        """Take steps of each image, as `Denoiser.advance` does, and record the last one's result.

        `has_preview`: whether to preview each image.
        """
        of_row = {
            id(image.row): (image, is_shown)
            for image, is_shown in zip(images, has_preview, strict=True)
        }

        def on_velocities(rows: Sequence[DenoiseRow], velocities: Tensor) -> None:
            sums, wanted = HostCopy(velocities.flatten(1).sum(1)), []
            for place, row in enumerate(rows):
                image, is_shown = of_row[id(row)]
                image.sums, image.place = sums, place
                wanted += [image] * is_shown
            if wanted:
                self._preview(wanted, select_rows(velocities, [image.place for image in wanted]))

        self._denoiser.advance([image.row for image in images], num_steps, on_velocities)

    def evaluate_ahead(self, images: Sequence[RunningImage], num_steps: Sequence[int]) -> None:
        """Take steps of each image and evaluate one branch more: `Denoiser.evaluate_ahead`."""
        self._denoiser.evaluate_ahead([image.row for image in images], num_steps)

    def decode(self, images: Sequence[RunningImage]) -> list[tuple[HostCopy, HostCopy]]:
        """Decode finished images to `[height, width, 3]` bytes, and whether each is finite."""
        return self._decoder.decode([(each.row.sample.sample, each.request) for each in images])

    def close(self) -> None:
        """Release everything; asserts that no image is left."""
        assert self.pools.num_used == 0, "a finished image still holds its latents"
        self._prompts.close()
        self.pools.trim()

    def _check(self, request: ImageRequest, index: int) -> _CheckedRequest:
        cache, adapters = self.cache_of(request), self.adapters.check(request.adapters)
        prompts = ImagePrompts(self.recipe.prompts(request), request.tenant, adapters)
        return _CheckedRequest(request, index, cache, prompts)

    def _open(
        self, checked: _CheckedRequest, texts: EncodedPrompts, stack: ExitStack
    ) -> RunningImage | TriptychError:
        """Prepare an image; `stack` releases it if a later image raises."""
        self._decoder.make_room(checked.request)
        row = _attempt(
            self.recipe.prepare,
            checked.request,
            self.pools,
            texts.texts,
            index=checked.index,
            cache=checked.cache,
        )
        if not isinstance(row, DenoiseRow):
            texts.release()
            return row
        stack.callback(row.release)
        self._denoiser.begin(row)
        for branch in row.branches:
            branch.conditioning = replace(branch.conditioning, adapters=checked.prompts.adapters)
        if isinstance(checked.request, HookedRequest):
            install_hook(checked.request.on_step_end, row, checked.index)
        return RunningImage(request=checked.request, row=row, texts=texts, step=row.sample.step)

    def _preview(self, images: list[RunningImage], velocities: Tensor) -> None:
        """Preview images of one shape, before they take the step with these velocities."""
        cleans = clean_samples([image.row.sample for image in images], velocities)
        for image, clean in zip(images, cleans, strict=True):
            edit = image.row.inpainting
            shown = clean if edit is None else torch.lerp(edit.clean, clean, edit.mask)
            image.preview = self._decoder.preview(shown, image.request)


def _attempt(call: Callable[P, Found], *args: P.args, **kwargs: P.kwargs) -> Found | TriptychError:
    try:
        return call(*args, **kwargs)
    except TriptychError as error:
        return error
