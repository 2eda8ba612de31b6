"""One model's recipe, denoise loop, caches and state, merge_rows.

Owns the way from a request as it came over the wire to a row, and from a row to pixels. Knows no
plan and no queue: the runner decides what is done when.
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
from triptych.modalities.diffusion.engine.caches.choice import CacheBook
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.latent_decoder import LatentDecoder
from triptych.modalities.diffusion.engine.prompts import Asked, HeldTexts, PromptCache
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.samplers.rows import clean_samples
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools, select_rows
from triptych.modalities.diffusion.wire import ImageRequest

P = ParamSpec("P")
Found = TypeVar("Found")


@dataclass(eq=False, slots=True, kw_only=True)
class RunningImage:
    """An image under way. `release` once, however it ends.

    Up to `step`, of which `num_computed` ran the model, its steps were counted, and `num_rows` that
    the model was run for. Of the last step taken: its velocity's sum, finite if all of it was, at
    `place` in `sums`; the preview wanted.
    """

    request: ImageRequest
    row: DenoiseRow
    texts: HeldTexts
    step: int
    num_computed: int = 0
    num_rows: int = 0
    sums: HostCopy | None = None
    place: int = 0
    preview: HostCopy | None = None

    @property
    def num_runs(self) -> int:
        """Steps that the model was run at, for some branch."""
        return max(branch.num_runs for branch in self.row.branches)

    @property
    def num_rows_run(self) -> int:
        """How often the model was run for one of its branches."""
        return sum(branch.num_runs for branch in self.row.branches)

    def release(self) -> None:
        """Give back its row, its caches and its prompts."""
        self.row.release()
        self.texts.release()


@dataclass(frozen=True, slots=True)
class _Order:
    """An image that can be generated: the one of this index."""

    request: ImageRequest
    index: int
    cache: CacheMethod | None
    asked: Asked


class ImageExecutor:
    """Generates with one model. All calls come from one thread, but for `cache_of`."""

    def __init__(
        self,
        recipe: Recipe,
        denoiser: Denoiser,
        *,
        caches: CacheBook,
        prompts: PromptCache,
        adapters: Adapters,
        decoder: LatentDecoder,
    ) -> None:
        self.recipe = recipe
        self.pools = TensorPools()
        self._denoiser = denoiser
        self._caches = caches
        self._prompts = prompts
        self._adapters = adapters
        self._decoder = decoder

    def cache_of(self, request: ImageRequest) -> CacheMethod | None:
        """The step cache of a request. Raises `RequestError` for what cannot be generated."""
        self._adapters.check(request.adapters)
        self.recipe.check(request)
        num_steps = self.recipe.num_steps(request)
        return self._caches.method(request.cache, num_steps, request.sampler)

    def begin(
        self, asked: Sequence[tuple[ImageRequest, int]]
    ) -> list[RunningImage | TriptychError]:
        """Encode and prepare the image of some index of each request.

        What cannot be generated yields its error. Where this raises, nothing was begun.
        """
        self.pools.trim()  # unused sizes keep no memory
        orders = [_caught(self._order, *each) for each in asked]
        good = [order for order in orders if isinstance(order, _Order)]
        with ExitStack() as stack:
            held = self._prompts.hold([order.asked for order in good])
            for texts in held:
                stack.callback(texts.release)
            begun = iter([self._open(*pair, stack) for pair in zip(good, held, strict=True)])
            stack.pop_all()
        return [next(begun) if isinstance(order, _Order) else order for order in orders]

    def advance(
        self, images: Sequence[RunningImage], num_steps: Sequence[int], shown: Sequence[bool]
    ) -> None:
        """Take steps of each image, as `Denoiser.advance` does, and note what came of the last.

        `shown`: whose preview is wanted.
        """
        of_row = {
            id(image.row): (image, is_shown) for image, is_shown in zip(images, shown, strict=True)
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
        """Take steps of each image, and ask a branch more, as `Denoiser.evaluate_ahead` does."""
        self._denoiser.evaluate_ahead([image.row for image in images], num_steps)

    def decode(self, images: Sequence[RunningImage]) -> list[tuple[HostCopy, HostCopy]]:
        """The finished images, `[height, width, 3]` bytes, and whether each is finite."""
        return self._decoder.decode([(each.row.sample.sample, each.request) for each in images])

    def close(self) -> None:
        """Forget everything; asserts that no image is left."""
        assert self.pools.num_used == 0, "an image that is over still holds its latents"
        self._prompts.close()
        self.pools.trim()

    def _order(self, request: ImageRequest, index: int) -> _Order:
        cache, acting = self.cache_of(request), self._adapters.check(request.adapters)
        asked = Asked(self.recipe.prompts(request), request.tenant, acting)
        return _Order(request, index, cache, asked)

    def _open(
        self, order: _Order, texts: HeldTexts, stack: ExitStack
    ) -> RunningImage | TriptychError:
        """Prepare an image; on an error in the stack's time it is released."""
        self._decoder.make_room(order.request)
        row = _caught(
            self.recipe.prepare,
            order.request,
            self.pools,
            texts.texts,
            index=order.index,
            cache=order.cache,
        )
        if not isinstance(row, DenoiseRow):
            texts.release()
            return row
        stack.callback(row.release)
        self._denoiser.begin(row)
        for branch in row.branches:
            branch.conditioning = replace(branch.conditioning, adapters=order.asked.adapters)
        return RunningImage(request=order.request, row=row, texts=texts, step=row.sample.step)

    def _preview(self, images: list[RunningImage], velocities: Tensor) -> None:
        """Previews of images of one shape, before they take the step of these velocities."""
        cleans = clean_samples([image.row.sample for image in images], velocities)
        for image, clean in zip(images, cleans, strict=True):
            edit = image.row.inpainting
            shown = clean if edit is None else torch.lerp(edit.clean, clean, edit.mask)
            image.preview = self._decoder.preview(shown, image.request)


def _caught(call: Callable[P, Found], *args: P.args, **kwargs: P.kwargs) -> Found | TriptychError:
    try:
        return call(*args, **kwargs)
    except TriptychError as error:
        return error
