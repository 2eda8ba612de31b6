"""Turns the plans of the denoise scheduler into device work.

Owns the images under way, and what a plan that failed leaves behind: nothing that it began, and
every other image so that the same plan, whole or in parts, can be tried again. A fault that only
some images of a plan have ends those alone. Knows no policy, no model and no tensor's meaning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.plan import Plan, StepResult
from triptych.core.errors import NonFinite, OutOfMemory, TriptychError
from triptych.core.runtime.devices.device import end_of_work
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.modalities.diffusion.engine.executor import ImageExecutor, RunningImage
from triptych.modalities.diffusion.plan import (
    DenoisePlan,
    ImageKey,
    ImageRow,
    ImageRowResult,
    ImageStart,
    PlannedSteps,
)
from triptych.schedulers.health import translate

RowT = TypeVar("RowT", ImageRow, ImageStart)
Yield = Callable[[], ImageRowResult]
"""Waits for the device, and returns what a step yielded of one image."""

_log = logging.getLogger(__name__)


class DenoiseRunner:
    """Implements `core.engine_api.plan.Runner` for `DenoisePlan`s.

    One that `is_divided` runs while other ranks run the same: there a step that fails is not tried
    row by row, since the others may have got through it.
    """

    def __init__(
        self, executor: ImageExecutor, device: torch.device, *, is_divided: bool = False
    ) -> None:
        self._executor = executor
        self._device = device
        self._is_divided = is_divided
        self._stream = StepStream(device)
        self._images: dict[ImageKey, RunningImage] = {}

    def launch(self, plan: Plan) -> PendingImages:
        """Start a step; on a CPU the work is done when this returns. Raises `OutOfMemory`.

        Where it raises, an image may have taken some of its steps already; planned again, it takes
        those that are left, and all of them are counted.
        """
        assert isinstance(plan, DenoisePlan), "a plan of the denoise scheduler"
        for key in plan.dropped:
            self._drop(key)
        try:
            with torch.inference_mode(), self._stream.current():
                yields = self._run(plan)
                wait = end_of_work(self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error
        return PendingImages(yields, wait)

    def close(self) -> None:
        """Let go of the model and of everything under way."""
        for key in tuple(self._images):
            self._drop(key)
        self._executor.close()
        del self._executor

    @property
    def num_images(self) -> int:
        """Images under way."""
        return len(self._images)

    def _run(self, plan: DenoisePlan) -> list[Yield]:
        match plan.kind:
            case "encode":
                return _separably(self._encode, plan.starts)
            case "denoise" if self._is_divided:
                return self._denoise(plan.rows)
            case "denoise":
                return _separably(self._denoise, plan.rows)
            case "decode":
                return _separably(self._decode, plan.rows)
            case _:
                return []

    def _encode(self, starts: Sequence[ImageStart]) -> list[Yield]:
        begun = self._executor.begin([(start.request, start.key.image) for start in starts])
        for start, found in zip(starts, begun, strict=True):
            if isinstance(found, RunningImage):
                self._images[start.key] = found
        return [_begun(self._executor, found) for found in begun]

    def _denoise(self, rows: Sequence[ImageRow]) -> list[Yield]:
        images = self._known(rows)
        ends = [
            min(image.step + row.num_steps, image.row.num_steps)
            for image, row in zip(images, rows, strict=True)
        ]
        left = [end - image.row.sample.step for image, end in zip(images, ends, strict=True)]
        asking = [i for i, row in enumerate(rows) if row.evaluates_ahead and left[i] >= 0]
        going = [i for i, row in enumerate(rows) if not row.evaluates_ahead and left[i] > 0]
        if asking:
            asked = [images[index] for index in asking]
            self._executor.evaluate_ahead(asked, [left[index] for index in asking])
        self._executor.advance(
            [images[index] for index in going],
            [left[index] for index in going],
            [rows[index].has_preview for index in going],
        )
        return [_stepped(*each) for each in zip(images, rows, ends, strict=True)]

    def _decode(self, rows: Sequence[ImageRow]) -> list[Yield]:
        decoded = self._executor.decode(self._known(rows))
        for row in rows:
            self._drop(row.key)
        return [_decoded(*copies) for copies in decoded]

    def _known(self, rows: Sequence[ImageRow]) -> list[RunningImage]:
        unknown = [row.key for row in rows if row.key not in self._images]
        assert not unknown, f"planned before they were begun, or after they were over: {unknown}"
        return [self._images[row.key] for row in rows]

    def _drop(self, key: ImageKey) -> None:
        """Release an image; one that was never begun, or is over, is ignored."""
        image = self._images.pop(key, None)
        if image is not None:
            image.release()


class PendingImages:
    """A launched step."""

    def __init__(self, yields: Sequence[Yield], wait: Callable[[], None]) -> None:
        self._yields = yields
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for the device and bring over what was made."""
        rows = tuple(each() for each in self._yields)
        self._wait()
        return StepResult(rows=rows)


def _separably(do: Callable[[Sequence[RowT]], list[Yield]], rows: Sequence[RowT]) -> list[Yield]:
    """Do it to all rows at once; where that fails, to each alone, so that no other pays for it.

    What concerns no single row is raised: want of memory, and what fails every row alone, too.
    """
    try:
        return do(rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, it may be one row's that has strangers beside it
        if len(rows) == 1:
            raise
        _log.warning("a step failed, and is taken row by row: %s", error)
    tries = [_attempt(do, row) for row in rows]
    faults = [found for found in tries if isinstance(found, Exception)]
    if len(faults) == len(rows):
        raise faults[0]
    return [_failed(found) if isinstance(found, Exception) else found for found in tries]


def _attempt(do: Callable[[Sequence[RowT]], list[Yield]], row: RowT) -> Yield | Exception:
    try:
        return do([row])[0]
    except Exception as error:  # as above
        return error


def _failed(error: Exception) -> Yield:
    public = translate(error)
    _log.error("an image failed: %s", public.message, exc_info=error)
    return lambda: ImageRowResult(error=public)


def _begun(executor: ImageExecutor, found: RunningImage | TriptychError) -> Yield:
    if isinstance(found, TriptychError):
        result = ImageRowResult(error=found)
    else:
        planned = PlannedSteps(
            num_rows=tuple(found.row.planned_runs()),
            first_step=found.step,
            num_prompt_tokens=executor.recipe.num_prompt_tokens(found.request),
            is_prompt_cut=executor.recipe.is_prompt_cut(found.request),
        )
        result = ImageRowResult(planned=planned)
    return lambda: result


def _stepped(image: RunningImage, row: ImageRow, end: int) -> Yield:
    """Note that the scheduler counts on these steps from now on."""
    # A step that is not taken yet is counted with the branch that takes it.
    num_counted = image.num_computed if row.evaluates_ahead else image.num_runs
    num_computed, image.num_computed = num_counted - image.num_computed, num_counted
    num_rows, image.num_rows = image.num_rows_run - image.num_rows, image.num_rows_run
    image.step = end
    sums, place, preview = image.sums, image.place, image.preview
    image.preview = None

    def wait() -> ImageRowResult:
        if sums is not None and not math.isfinite(sums.get()[place]):
            return ImageRowResult(error=_non_finite())
        pixels = None if preview is None else _pixels(preview)
        return ImageRowResult(num_computed=num_computed, num_rows=num_rows, pixels=pixels)

    return wait


def _decoded(pixels: HostCopy, is_finite: HostCopy) -> Yield:
    def wait() -> ImageRowResult:
        if not is_finite.get():
            return ImageRowResult(error=_non_finite())
        return ImageRowResult(pixels=_pixels(pixels))

    return wait


def _pixels(copy: HostCopy) -> Pixels:
    rows = copy.get()
    return Pixels(width=rows.shape[1], height=rows.shape[0], rgb=rows.numpy().tobytes())


def _non_finite() -> NonFinite:
    return NonFinite("The image's latents are not finite: try another seed, or fewer options.")
