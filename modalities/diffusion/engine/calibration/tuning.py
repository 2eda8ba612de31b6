"""The calibration experiment: generate without a cache, search plans, and try each plan.

Owns the experiment. `planning` searches, `measuring` measures, `file` stores. A plan is recorded
with its measured quality, not the expected one.
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
    error_model,
)
from triptych.modalities.diffusion.engine.calibration.planning import (
    ErrorModel,
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
"""Shares of all steps that the tried plans compute."""
ORDERS = (0, 1, 2)
"""Degrees of extrapolation to try."""
DAMPINGS = (0.0, 1.5, 3.0, 4.5, 6.0)
"""Rates to try at which later steps correct an early error; see `ErrorModel.damped`."""
PEAK_DB = 99.0
"""The PSNR recorded for equal images."""
_LEAST = 2
_MEASURING = 0.25  # of all the work, approximately

Report = Callable[[float], None]
"""Called with the share of the work that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A calibration, and the speedup of each of its plans over generation without a cache."""

    run: CalibratedRun
    speedups: tuple[float, ...]


class _Candidate(NamedTuple):
    """A plan before its trial."""

    error: float
    order: int
    mask: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """A calibration image and its encoded prompts."""

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
        """Calibrate for the steps and sampler of the images, which all share them.

        Raises `InvalidRequest` for a sampler without plans, or too few steps.
        """
        subjects = [
            _Subject(request, self._recipe.encode_all(self._recipe.prompts(request)))
            for request in requests
        ]
        size = self._batch_size
        parts = [subjects[start : start + size] for start in range(0, len(subjects), size)]
        calibration, model, references = self._measure(parts, report)
        _, plain_s = self._generate(parts[0], None)
        model = model.damped(self._damping(parts[0], model, references, shares))
        candidates = _candidates(model, shares)
        plans, speedups = [], []
        for index, group in enumerate(candidates):
            report(_MEASURING + (1 - _MEASURING) * index / len(candidates))
            plan, elapsed_s = self._try(parts, group, references)
            plans.append(plan)
            speedups.append(plain_s / elapsed_s)
        report(1.0)
        run = _summary(requests, self._recipe, calibration, plans)
        return Tuned(run=run, speedups=tuple(speedups))

    def _damping(
        self,
        part: Sequence[_Subject],
        model: ErrorModel,
        references: Sequence[Tensor],
        shares: Sequence[float],
    ) -> float:
        """The damping whose plan with rather few computed steps generates best.

        With even fewer steps no plan is good, with many all are.
        """
        found: dict[float, float] = {}
        for rate in DAMPINGS:
            plans = _candidates(model.damped(rate), shares, orders=(0,))
            (candidate,) = plans[len(plans) // 3]
            images, _ = self._generate(part, _method(candidate))
            found[rate] = _worst_db(references[: len(part)], images)
        return max(found, key=found.__getitem__)

    def _try(
        self,
        parts: Sequence[Sequence[_Subject]],
        group: Sequence[_Candidate],
        references: Sequence[Tensor],
    ) -> tuple[TriedPlan, float]:
        """The best plan for the first part, tried on all parts, and its time for the first."""
        generated = {candidate: self._generate(parts[0], _method(candidate)) for candidate in group}
        errors = {
            candidate: _worst_db(references[: len(parts[0])], images)
            for candidate, (images, _) in generated.items()
        }
        best = max(group, key=lambda candidate: errors[candidate])
        images, elapsed_s = generated[best]
        for part in parts[1:]:
            images = images + self._generate(part, _method(best))[0]
        return _trial_result(best, references, images), elapsed_s

    def _measure(
        self, parts: Sequence[Sequence[_Subject]], report: Report
    ) -> tuple[Calibration, ErrorModel, list[Tensor]]:
        """Generate all images without a cache, and measure the runs."""
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
                model = error_model(total, rows[0])
                images += self._decode(part, rows)
        assert total is not None, "there is an image"
        return total, model, images

    def _generate(
        self, part: Sequence[_Subject], method: CacheMethod | None
    ) -> tuple[list[Tensor], float]:
        """Images, and the seconds of denoising."""
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
    model: ErrorModel, shares: Sequence[float], *, orders: Sequence[int] = ORDERS
) -> list[list[_Candidate]]:
    """The best plan of each degree, for each share of steps with plans."""
    num_steps = len(model.points)
    wanted = sorted({max(_LEAST, round(share * num_steps)) for share in shares})
    found: dict[int, list[_Candidate]] = {count: [] for count in wanted if count < num_steps}
    for order in orders if found else ():
        extrapolator = DividedDifferences(order)
        plans = all_plans(model, extrapolator, max(found))
        for count in found.keys() & plans.keys():
            error = expected_error(model, extrapolator, plans[count])
            found[count].append(_Candidate(error, order, plans[count]))
    candidates = [group for group in found.values() if group]
    if not candidates:
        raise InvalidRequest(f"None of {num_steps} steps can be skipped: calibrate for more steps.")
    return candidates


def _method(candidate: _Candidate) -> CacheMethod:
    return planned(candidate.mask, order=candidate.order)


def _worst_db(references: Sequence[Tensor], images: Sequence[Tensor]) -> float:
    return min(psnr_db(one, other) for one, other in zip(references, images, strict=True))


def _trial_result(
    candidate: _Candidate, references: Sequence[Tensor], images: Sequence[Tensor]
) -> TriedPlan:
    psnrs_db = [psnr_db(one, other) for one, other in zip(references, images, strict=True)]
    return TriedPlan(
        computed=tuple(step for step, computes in enumerate(candidate.mask) if computes),
        order=candidate.order,
        expected_error=candidate.error,
        median_psnr_db=round(float(np.median(psnrs_db)), 2),
        low_psnr_db=round(float(np.quantile(psnrs_db, 0.1)), 2),
    )


def psnr_db(one: Tensor, other: Tensor) -> float:
    """The peak signal-to-noise ratio of two images with values in 0..1.

    Raises `NonFinite` if an image has NaN.
    """
    error = float((one - other).double().square().mean())
    if not math.isfinite(error):
        raise NonFinite("The model generated non-finite values: calibrate it with another --dtype.")
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
