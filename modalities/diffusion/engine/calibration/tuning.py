"""A model calibrated: images generated whole, plans made of what was measured, and each plan tried.

Owns the experiment. The search for plans is `planning`'s, the measuring `measuring`'s, the file
`file`'s. A plan is written down with what it generated, not with what it promised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import InvalidRequest, NonFinite
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import (
    RESCALING_DEGREE,
    CacheMethod,
    fit_rescaling,
    planned,
)
from triptych.modalities.diffusion.engine.calibration.file import CalibratedRun, TriedPlan
from triptych.modalities.diffusion.engine.calibration.measuring import (
    Calibration,
    calibrate,
    measured,
)
from triptych.modalities.diffusion.engine.calibration.planning import (
    Measured,
    all_plans,
    expected_error,
)
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.recipes.recipe import EncodedText, Recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.sampler_names import short_name
from triptych.modalities.diffusion.wire import ImageRequest

SHARES = (0.12, 0.16, 0.2, 0.28, 0.34, 0.4, 0.5, 0.65)
"""Which parts of all steps the plans that are tried compute."""
ORDERS = (0, 1, 2)
"""Degrees of extrapolation that a plan may have."""
DAMPINGS = (0.0, 1.5, 3.0, 4.5, 6.0)
"""How much of an early error may be mended by the steps after it; see `Measured.damped`."""
PEAK_DB = 99.0
"""What is written down for images that are equal."""
_LEAST = 2
_MEASURING = 0.25  # of all the work, about

Report = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A calibration, and how many times faster than without a cache each of its plans generated."""

    run: CalibratedRun
    speedups: tuple[float, ...]


class _Promise(NamedTuple):
    """A plan before it is tried."""

    error: float
    order: int
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """An image to calibrate with, and its prompts, encoded once."""

    request: ImageRequest
    texts: Sequence[EncodedText]


class Tuner:
    """Calibrates one model, `batch_size` images at a time."""

    def __init__(self, recipe: Recipe, denoiser: Denoiser, *, batch_size: int) -> None:
        self._recipe = recipe
        self._denoiser = denoiser
        self._batch_size = batch_size
        self._pools = TensorPools()

    @torch.inference_mode()
    def tune(
        self, requests: Sequence[ImageRequest], report: Report, shares: Sequence[float] = SHARES
    ) -> Tuned:
        """Calibrate for the images' steps and sampler, which are the same in all of them.

        Raises `InvalidRequest` for a sampler that no plan can be made for, or too few steps.
        """
        subjects = [
            _Subject(request, self._recipe.encode_all(self._recipe.prompts(request)))
            for request in requests
        ]
        size = self._batch_size
        parts = [subjects[start : start + size] for start in range(0, len(subjects), size)]
        calibration, model, wholes = self._measure(parts, report)
        _, plain_s = self._generate(parts[0], None)
        model = model.damped(self._damping(parts[0], model, wholes, shares))
        candidates = _candidates(model, shares)
        plans, speedups = [], []
        for index, promises in enumerate(candidates):
            report(_MEASURING + (1 - _MEASURING) * index / len(candidates))
            plan, elapsed_s = self._try(parts, promises, wholes)
            plans.append(plan)
            speedups.append(plain_s / elapsed_s)
        report(1.0)
        run = _summary(requests, self._recipe, calibration, plans)
        return Tuned(run=run, speedups=tuple(speedups))

    def _damping(
        self,
        part: Sequence[_Subject],
        model: Measured,
        wholes: Sequence[Tensor],
        shares: Sequence[float],
    ) -> float:
        """The damping with which a plan generates best that computes rather few steps.

        With fewer yet no plan is good, with many all are.
        """
        found: dict[float, float] = {}
        for rate in DAMPINGS:
            plans = _candidates(model.damped(rate), shares, orders=(0,))
            (promise,) = plans[len(plans) // 3]
            images, _ = self._generate(part, _method(promise))
            found[rate] = _worst_db(wholes[: len(part)], images)
        return max(found, key=found.__getitem__)

    def _try(
        self,
        parts: Sequence[Sequence[_Subject]],
        promises: Sequence[_Promise],
        wholes: Sequence[Tensor],
    ) -> tuple[TriedPlan, float]:
        """The best plan for the first part, tried on all parts, and its seconds for the first."""
        generated = {promise: self._generate(parts[0], _method(promise)) for promise in promises}
        errors = {
            promise: _worst_db(wholes[: len(parts[0])], images)
            for promise, (images, _) in generated.items()
        }
        best = max(promises, key=lambda promise: errors[promise])
        images, elapsed_s = generated[best]
        for part in parts[1:]:
            images = images + self._generate(part, _method(best))[0]
        return _tried(best, wholes, images), elapsed_s

    def _measure(
        self, parts: Sequence[Sequence[_Subject]], report: Report
    ) -> tuple[Calibration, Measured, list[Tensor]]:
        """The images as they are without a cache, and what was measured meanwhile."""
        total: Calibration | None = None
        images: list[Tensor] = []
        for index, part in enumerate(parts):
            report(_MEASURING * index / len(parts))
            with self._rows(part, None) as rows:
                found = calibrate(self._denoiser, rows, self._pools)
                if total is None:
                    total = found
                else:
                    total.merge(found)
                model = measured(total, rows[0])
                images += self._decode(part, rows)
        assert total is not None, "there is an image"
        return total, model, images

    def _generate(
        self, part: Sequence[_Subject], method: CacheMethod | None
    ) -> tuple[list[Tensor], float]:
        """Images, and the seconds that denoising took."""
        with self._rows(part, method) as rows:
            started_s = time.perf_counter()
            while not rows[0].is_done:
                self._denoiser.step(rows)
            rows[0].sample.sample.cpu()  # waits for the device
            elapsed_s = time.perf_counter() - started_s
            return self._decode(part, rows), elapsed_s

    @contextmanager
    def _rows(
        self, part: Sequence[_Subject], method: CacheMethod | None
    ) -> Iterator[list[DenoiseRow]]:
        with ExitStack() as stack:
            rows = []
            for subject in part:
                row = self._recipe.prepare(
                    subject.request, self._pools, subject.texts, cache=method
                )
                rows.append(row)
                stack.callback(row.release)
            yield rows

    def _decode(self, part: Sequence[_Subject], rows: Sequence[DenoiseRow]) -> list[Tensor]:
        return [
            self._recipe.decode(row.sample.sample, subject.request).cpu()
            for subject, row in zip(part, rows, strict=True)
        ]


def _candidates(
    model: Measured, shares: Sequence[float], *, orders: Sequence[int] = ORDERS
) -> list[list[_Promise]]:
    """For each share of the steps that there are plans for, the best of each degree."""
    num_steps = len(model.points)
    wanted = sorted({max(_LEAST, round(share * num_steps)) for share in shares})
    found: dict[int, list[_Promise]] = {count: [] for count in wanted if count < num_steps}
    for order in orders if found else ():
        extrapolator = DividedDifferences(order)
        plans = all_plans(model, extrapolator, max(found))
        for count in found.keys() & plans.keys():
            error = expected_error(model, extrapolator, plans[count])
            found[count].append(_Promise(error, order, plans[count]))
    candidates = [promises for promises in found.values() if promises]
    if not candidates:
        raise InvalidRequest(f"Of {num_steps} steps none can be skipped: calibrate for more.")
    return candidates


def _method(promise: _Promise) -> CacheMethod:
    return planned(promise.mask, order=promise.order)


def _worst_db(wholes: Sequence[Tensor], images: Sequence[Tensor]) -> float:
    return min(psnr_db(one, other) for one, other in zip(wholes, images, strict=True))


def _tried(promise: _Promise, wholes: Sequence[Tensor], images: Sequence[Tensor]) -> TriedPlan:
    psnrs_db = [psnr_db(one, other) for one, other in zip(wholes, images, strict=True)]
    return TriedPlan(
        computed=tuple(step for step, computes in enumerate(promise.mask) if computes),
        order=promise.order,
        expected_error=promise.error,
        median_psnr_db=round(float(np.median(psnrs_db)), 2),
        low_psnr_db=round(float(np.quantile(psnrs_db, 0.1)), 2),
    )


def psnr_db(one: Tensor, other: Tensor) -> float:
    """The peak signal-to-noise ratio of two images with values in 0..1.

    Raises `NonFinite` where one has NaN in it.
    """
    error = float((one - other).double().square().mean())
    if not math.isfinite(error):
        raise NonFinite("The model generated no numbers: calibrate it in another --dtype.")
    return min(PEAK_DB, -10 * math.log10(error)) if error else PEAK_DB


def _summary(
    requests: Sequence[ImageRequest],
    recipe: Recipe,
    calibration: Calibration,
    plans: Sequence[TriedPlan],
) -> CalibratedRun:
    distances = calibration.input_distances, calibration.output_distances
    is_enough = len(set(calibration.input_distances)) > RESCALING_DEGREE
    polynomial = fit_rescaling(*distances) if is_enough else ()
    return CalibratedRun(
        num_steps=recipe.num_steps(requests[0]),
        sampler=short_name(recipe.components["scheduler"], requests[0].sampler),
        num_evaluations=calibration.num_steps,
        num_images=len(requests),
        width=requests[0].width,
        height=requests[0].height,
        ratios=tuple(round(ratio, 6) for ratio in calibration.magnitude_ratios),
        polynomial=polynomial,
        plans=tuple(plans),
    )
