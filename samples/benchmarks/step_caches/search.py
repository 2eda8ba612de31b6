"""The search for the settings of every method: the same number of trials, with the same images.

Owns the trials, on other prompts and seeds than the measured ones. A trial generates all images
with one setting; its value is their mean PSNR to the uncached ones, and its cost the mean
number of model runs. Half of the trials are spread over all settings, the rest go to the
best setting and its neighbours. Methods with a threshold find it for each of their other settings
by interpolation on a logarithmic scale. Searches are independent, so that a search which continues
later finds the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from step_caches.measures import psnr_db
from step_caches.methods import HIGH, LOW, THRESHOLD, Calibrated, Method, Setting
from step_caches.subject import ImageSpec, Sampling, Subject
from triptych.modalities.diffusion.engine.caches.decisions import Gate
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level, fit_rescaling
from triptych.modalities.diffusion.engine.calibration.measuring import (
    Calibration,
    calibrate,
    error_model,
)
from triptych.modalities.diffusion.engine.calibration.planning import ErrorModel
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.families.span import SpanModel

_TRIALS_OF_SETTING = 2  # at once, with different thresholds
_EDGE = 0.15  # interpolated thresholds stay so far from both known ones, as a share


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, the runs of the model it took on average, and the mean PSNR."""

    setting: Setting
    num_runs: float
    psnr_db: float


Attempt = Callable[[CacheMethod], tuple[float, float]]
"""Generates all images with a cache; returns the mean number of runs and the mean PSNR."""


class Search:
    """Finds settings for one model and one way of sampling."""

    def __init__(self, known: Calibrated, attempt: Attempt, num_trials: int) -> None:
        self.known = known
        self._attempt = attempt
        self._num_trials = num_trials
        self._trials: dict[tuple[str, tuple[tuple[str, str | float], ...]], Trial] = {}

    @classmethod
    def of(
        cls, subject: Subject, sampling: Sampling, specs: Sequence[ImageSpec], num_trials: int
    ) -> Search:
        """Calibrate the methods on the images of the search."""
        wholes = subject.generate(specs, sampling).images_BCHW

        def attempt(cache: CacheMethod) -> tuple[float, float]:
            generated = subject.generate(specs, sampling, cache)
            return fmean(generated.num_runs), fmean(psnr_db(generated.images_BCHW, wholes))

        return cls(calibrated(subject, sampling, specs), attempt, num_trials)

    def best(self, method: Method, num_computed: int) -> Trial | None:
        """The trial of the highest PSNR among those that are cheap enough; `None` without any."""
        settings = list(method.settings(self.known, num_computed))
        space = _Space(settings, method.has_threshold, num_computed, self.known.num_steps)
        first = space.spread(self._num_trials // 2)
        while settings and len(space.trials) < self._num_trials:
            number = len(space.trials)
            setting = first[number] if number < len(first) else space.promising()
            if setting is None:
                break
            space.trials.append(self._try(method, space.whole(setting)))
        return space.best()

    def _try(self, method: Method, setting: Setting) -> Trial:
        """A trial. Images are generated once, though the trial counts for each of its budgets."""
        key = method.name, tuple(sorted(setting.items()))
        if key not in self._trials:
            found = self._attempt(method.open(setting, self.known))
            self._trials[key] = Trial(setting, *found)
        return self._trials[key]


@dataclass(frozen=True, slots=True)
class _Space:
    """All settings of a method for a budget, in the order of their values, and trials of them."""

    settings: Sequence[Setting]
    has_threshold: bool
    num_computed: int
    num_steps: int
    trials: list[Trial] = field(default_factory=list)

    def best(self) -> Trial | None:
        """The best of the trials that were cheap enough."""
        cheap = [trial for trial in self.trials if trial.num_runs <= self.num_computed]
        return max(cheap, key=lambda trial: trial.psnr_db, default=None)

    def spread(self, num_trials: int) -> list[Setting]:
        """Settings for `num_trials` trials, evenly from first to last."""
        each = _TRIALS_OF_SETTING if self.has_threshold else 1
        count = min(len(self.settings), max(1, num_trials // each))
        chosen = (self.settings[index * len(self.settings) // count] for index in range(count))
        return [setting for setting in chosen for _ in range(each)]

    def promising(self) -> Setting | None:
        """The best setting in turns with its nearest, least tried neighbour; `None` at the end.

        Without a threshold no setting is tried twice.
        """
        best = self.best() or min(self.trials, key=lambda trial: trial.num_runs)
        centre = _without_threshold(best.setting)
        near = sorted(self.settings, key=lambda setting: self._distance(setting, centre))
        if not self.has_threshold:
            return next((setting for setting in near if not self._of(setting)), None)
        if len(near) == 1 or len(self.trials) % 2:
            return centre
        return min(near[1:], key=lambda setting: len(self._of(setting)) // _TRIALS_OF_SETTING)

    def whole(self, setting: Setting) -> Setting:
        """The setting with the threshold to try next, if the method has one."""
        if not self.has_threshold:
            return setting
        tried, best = self._of(setting), self.best()
        if best and not tried:  # a threshold that suited another setting is near
            return {**setting, THRESHOLD: best.setting[THRESHOLD]}
        low, high = (LOW, float(self.num_steps)), (HIGH, 1.0)
        for trial in tried:
            point = float(trial.setting[THRESHOLD]), trial.num_runs
            if point[1] > self.num_computed:
                low = max(low, point)
            else:
                high = min(high, point)
        share = (low[1] - self.num_computed) / max(low[1] - high[1], 1e-9)
        share = min(max(share, _EDGE), 1 - _EDGE)
        threshold = math.exp((1 - share) * math.log(low[0]) + share * math.log(high[0]))
        return {**setting, THRESHOLD: float(f"{threshold:.4g}")}

    def _of(self, setting: Setting) -> list[Trial]:
        return [trial for trial in self.trials if _without_threshold(trial.setting) == setting]

    def _distance(self, setting: Setting, other: Setting) -> int:
        """How many values lie between two settings."""
        values = {name: list(dict.fromkeys(s[name] for s in self.settings)) for name in setting}
        return sum(abs(v.index(setting[n]) - v.index(other[n])) for n, v in values.items())


def _without_threshold(setting: Setting) -> Setting:
    return {name: value for name, value in setting.items() if name != THRESHOLD}


@torch.inference_mode()
def calibrated(subject: Subject, sampling: Sampling, specs: Sequence[ImageSpec]) -> Calibrated:
    """The calibration of methods, measured on uncached images."""
    total: Calibration | None = None
    model: ErrorModel | None = None
    ratios: list[tuple[float, ...]] = []
    for part in subject.batches(specs):
        with ExitStack() as stack:
            rows = subject.rows(stack, part, sampling, None)
            found = calibrate(subject.denoiser, rows, subject.pools)
            if total is None:
                total = found
            else:
                total.merge(found)
            model = error_model(total, rows[0])
        if isinstance(subject.denoiser.model, SpanModel):
            ratios += _span_ratios(subject, sampling, part)
    assert total is not None, "there is a spec"
    assert model is not None
    by_level = {Level.VELOCITY.value: total.magnitude_ratios}
    if ratios:
        by_level[Level.SPAN.value] = tuple(map(fmean, zip(*ratios, strict=True)))
    polynomial = fit_rescaling(total.input_distances, total.output_distances) if ratios else ()
    return Calibrated(measured=model, polynomial=polynomial, ratios=by_level)


class _Always(Gate):
    """Computes every step, so that the stored tensors can be read."""

    def wants_compute(self, step: int, distance: float) -> bool:
        return True


def _span_ratios(
    subject: Subject, sampling: Sampling, specs: Sequence[ImageSpec]
) -> list[tuple[float, ...]]:
    """MagCache's ratios of the blocks' residuals of each prompt's hidden states."""
    method = CacheMethod(
        open_gate=lambda _: _Always(), extrapolator=DividedDifferences(), level=Level.SPAN
    )
    norms: list[Tensor] = []
    with ExitStack() as stack:
        rows = subject.rows(stack, specs, sampling, method)
        while not rows[0].is_done:
            subject.denoiser.step(rows)
            norms.append(torch.stack([_kept(row).norm(dim=-1) for row in rows]))
    norms_NBT = torch.stack(norms)
    ratios_NB = (norms_NBT[1:] / (norms_NBT[:-1] + 1e-8)).flatten(2).mean(2)
    return [(1.0, *ratios.tolist()) for ratios in ratios_NB.T]


def _kept(row: DenoiseRow) -> Tensor:
    """The blocks' last residual for the prompt of a row."""
    cache = row.branches[0].cache
    assert cache is not None
    memory = cache.known()
    return memory.pool.read(memory.cells[:1])[0]
