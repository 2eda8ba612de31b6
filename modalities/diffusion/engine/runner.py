"""Runs the plans of the denoise scheduler on the device.

Owns the images in progress, and their state after a plan fails: images that it began are released,
and all others stay such that the same plan, or a part of it, can be tried again. An error of single
images ends only those. Knows no policy, no model and no meaning of tensors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
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
PendingResult = Callable[[], ImageRowResult]
"""Waits for the device, and returns the result of a step for one image."""

_log = logging.getLogger(__name__)


class DenoiseRunner:
    """Implements `core.engine_api.plan.Runner` for `DenoisePlan`s.

    With `is_divided`, other ranks run the same plans; a failed step is then not retried row by row,
    because other ranks may have completed it.
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

        If this raises, an image may have taken some of its steps. Planned again, it takes the
        remaining ones, and the result counts all of them.
        """
        assert isinstance(plan, DenoisePlan), "a plan of the denoise scheduler"
        for key in plan.dropped:
            self._drop(key)
        try:
            with torch.inference_mode(), self._stream.current():
                pending = self._run(plan)
                wait = end_of_work(self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("The step did not fit in device memory.") from error
        return PendingImages(pending, wait)

    def close(self) -> None:
        """Release the model and all images in progress."""
        for key in tuple(self._images):
            self._drop(key)
        self._executor.close()
        del self._executor

    @property
    def num_images(self) -> int:
        """The number of images in progress."""
        return len(self._images)

    def _run(self, plan: DenoisePlan) -> list[PendingResult]:
        match plan.kind:
            case "encode":
                return _run_isolated(self._encode, plan.starts)
            case "denoise" if self._is_divided:
                return self._denoise(plan.rows)
            case "denoise":
                return _run_isolated(self._denoise, plan.rows)
            case "write":
                return _run_isolated(self._write, plan.rows)
            case "decode":
                return _run_isolated(self._decode, plan.rows)
            case _:
                return []

    def _encode(self, starts: Sequence[ImageStart]) -> list[PendingResult]:
        begun = self._executor.begin([(start.request, start.key.image) for start in starts])
        for start, found in zip(starts, begun, strict=True):
            if isinstance(found, RunningImage):
                self._images[start.key] = found
        return [_encode_result(self._executor, found) for found in begun]

    def _write(self, rows: Sequence[ImageRow]) -> list[PendingResult]:
        images = self._images_of(rows)
        for image, row in zip(images, rows, strict=True):
            image.row.write_tokens(image.num_tokens + row.num_tokens)
        for image, row in zip(images, rows, strict=True):
            image.num_tokens += row.num_tokens
        return [ImageRowResult for _ in rows]

    def _denoise(self, rows: Sequence[ImageRow]) -> list[PendingResult]:
        images = self._images_of(rows)
        ends = [
            min(image.step + row.num_steps, image.row.num_steps)
            for image, row in zip(images, rows, strict=True)
        ]
        left = [end - image.row.sample.step for image, end in zip(images, ends, strict=True)]
        ahead = [i for i, row in enumerate(rows) if row.evaluates_ahead and left[i] >= 0]
        taking = [i for i, row in enumerate(rows) if not row.evaluates_ahead and left[i] > 0]
        if ahead:
            self._executor.evaluate_ahead(
                [images[index] for index in ahead], [left[index] for index in ahead]
            )
        self._executor.advance(
            [images[index] for index in taking],
            [left[index] for index in taking],
            [rows[index].has_preview for index in taking],
        )
        return [_step_result(*each) for each in zip(images, rows, ends, strict=True)]

    def _decode(self, rows: Sequence[ImageRow]) -> list[PendingResult]:
        decoded = self._executor.decode(self._images_of(rows))
        for row in rows:
            self._drop(row.key)
        return [_decode_result(*copies) for copies in decoded]

    def _images_of(self, rows: Sequence[ImageRow]) -> list[RunningImage]:
        unknown = [row.key for row in rows if row.key not in self._images]
        assert not unknown, f"planned before their start or after their end: {unknown}"
        return [self._images[row.key] for row in rows]

    def _drop(self, key: ImageKey) -> None:
        """Release an image, unless it never began or has ended."""
        image = self._images.pop(key, None)
        if image is not None:
            image.release()


class PendingImages:
    """A launched step."""

    def __init__(self, pending: Sequence[PendingResult], wait: Callable[[], None]) -> None:
        self._yields = pending
        self._wait = wait

    def result(self) -> StepResult:
        """Wait for the device and copy the results to the host."""
        self._wait()
        return StepResult(rows=tuple(each() for each in self._yields))


def _run_isolated(
    do: Callable[[Sequence[RowT]], list[PendingResult]], rows: Sequence[RowT]
) -> list[PendingResult]:
    """Process all rows at once; if that fails, each alone, so that one cannot fail the others.

    Raises out-of-memory errors, and the first error if every row fails alone.
    """
    try:
        return do(rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error may be caused by one row of several clients
        if len(rows) == 1:
            raise
        _log.warning("a step failed and is retried row by row: %s", error)
    tries = [_attempt(do, row) for row in rows]
    faults = [found for found in tries if isinstance(found, Exception)]
    if len(faults) == len(rows):
        raise faults[0]
    return [_error_result(found) if isinstance(found, Exception) else found for found in tries]


def _attempt(
    do: Callable[[Sequence[RowT]], list[PendingResult]], row: RowT
) -> PendingResult | Exception:
    try:
        return do([row])[0]
    except Exception as error:  # see `_run_isolated`
        return error


def _error_result(error: Exception) -> PendingResult:
    public = translate(error)
    _log.error("an image failed: %s", public.message, exc_info=error)
    return lambda: ImageRowResult(error=public)


def _encode_result(executor: ImageExecutor, found: RunningImage | TriptychError) -> PendingResult:
    if isinstance(found, TriptychError):
        result = ImageRowResult(error=found)
    else:
        planned = PlannedSteps(
            num_rows=tuple(found.row.planned_runs()),
            first_step=found.step,
            num_tokens=found.row.num_tokens,
            num_prompt_tokens=executor.recipe.num_prompt_tokens(found.request),
            is_prompt_cut=executor.recipe.is_prompt_cut(found.request),
        )
        result = ImageRowResult(planned=planned)
    return lambda: result


def _step_result(image: RunningImage, row: ImageRow, end: int) -> PendingResult:
    """The result of taking steps up to `end`, counted from the last result on."""
    # A half step is counted as computed with the plan that completes it.
    num_counted = image.num_computed if row.evaluates_ahead else image.num_runs
    num_computed, image.num_computed = num_counted - image.num_computed, num_counted
    num_rows, image.num_rows = image.num_rows_run - image.num_rows, image.num_rows_run
    image.step = end
    sums, place, preview = image.sums, image.place, image.preview
    is_interrupted = image.row.is_interrupted
    image.preview = None

    def wait() -> ImageRowResult:
        if sums is not None and not math.isfinite(sums.get()[place]):
            return ImageRowResult(error=_non_finite())
        pixels = None if preview is None else _pixels(preview.get().numpy())
        return ImageRowResult(
            num_computed=num_computed,
            num_rows=num_rows,
            pixels=pixels,
            is_interrupted=is_interrupted,
        )

    return wait


def _decode_result(pixels: HostCopy, is_finite: HostCopy) -> PendingResult:
    def wait() -> ImageRowResult:
        if not is_finite.get():
            return ImageRowResult(error=_non_finite())
        decoded = pixels.get().numpy()
        if decoded.ndim == 3:
            return ImageRowResult(pixels=_pixels(decoded))
        whole, *layers = map(_pixels, decoded)
        return ImageRowResult(pixels=whole, layers=tuple(layers))

    return wait


def _pixels(rows_HWC: np.ndarray[Any, Any]) -> Pixels:
    """An image of three channels, or of four with alpha."""
    height, width, _ = rows_HWC.shape
    rgb, alpha = (part.tobytes() for part in (rows_HWC[..., :3], rows_HWC[..., 3:]))
    return Pixels(width=width, height=height, rgb=rgb, alpha=alpha)


def _non_finite() -> NonFinite:
    return NonFinite("The image's latents are not finite: try another seed or other options.")
