"""The search that gives every method its settings: the same budget of trials, the same pictures.

Owns the trials, on prompts and seeds apart from those that are measured. A trial draws all of them
with one setting; its value is their mean PSNR to the uncached ones, and what it costs the mean
number of model runs. Methods with a threshold find it for each of their other settings by
interpolation on a logarithmic scale; the trials left go to the most promising ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from step_caches.measures import psnr_db
from step_caches.methods import THRESHOLD, Calibrated, Method, Setting
from step_caches.subject import Sampling, Subject, Wish
from triptych.modalities.diffusion.engine.caches.decisions import Gate
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, Level, fit_rescaling
from triptych.modalities.diffusion.engine.calibration.measuring import (
    Calibration,
    calibrate,
    measured,
)
from triptych.modalities.diffusion.engine.calibration.planning import Measured
from triptych.modalities.diffusion.engine.denoise import DenoiseRow
from triptych.modalities.diffusion.engine.families.span import SpanModel

LOW, HIGH = 1e-3, 10.0
"""Between these lie all thresholds."""
_FIRST_TRIALS = 2
_EDGE = 0.15  # interpolated thresholds stay so far from both known ones, as a share


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, the runs of the model it took on average, and the mean PSNR."""

    setting: Setting
    num_runs: float
    psnr_db: float


Attempt = Callable[[CacheMethod], tuple[float, float]]
"""Draws all pictures with a cache: the mean number of runs, and the mean PSNR."""


class Search:
    """Finds settings for one model and one way of sampling."""

    def __init__(self, known: Calibrated, attempt: Attempt, num_trials: int) -> None:
        self.known = known
        self._attempt = attempt
        self._num_trials = num_trials
        self._trials: dict[tuple[str, tuple[tuple[str, str | float], ...]], Trial] = {}

    @classmethod
    def of(
        cls, subject: Subject, sampling: Sampling, wishes: Sequence[Wish], num_trials: int
    ) -> Search:
        """Measures what methods must know, on the pictures of the search."""
        wholes = subject.draw(wishes, sampling).pictures_BCHW

        def attempt(cache: CacheMethod) -> tuple[float, float]:
            drawn = subject.draw(wishes, sampling, cache)
            return fmean(drawn.num_runs), fmean(psnr_db(drawn.pictures_BCHW, wholes))

        return cls(calibrated(subject, sampling, wishes), attempt, num_trials)

    def best(self, method: Method, num_computed: int) -> Trial | None:
        """The trial of the highest PSNR among those that are cheap enough; `None` without any."""
        settings = _spread(list(method.settings(self.known, num_computed)), self._num_trials)
        if method.has_threshold:
            self._seek_thresholds(method, settings, num_computed)
        else:
            for setting in settings:
                self._try(method, setting)
        return self._best_of(method, num_computed)

    def _seek_thresholds(
        self, method: Method, settings: Sequence[Setting], num_computed: int
    ) -> None:
        first = [setting for setting in settings for _ in range(_FIRST_TRIALS)][: self._num_trials]
        for setting in first:
            self._try(method, self._next(method, setting, num_computed))
        for _ in range(self._num_trials - len(first)):
            best = self._best_of(method, num_computed)
            # Without any that is cheap enough, the first setting goes on.
            setting = settings[0] if best is None else _without_threshold(best.setting)
            self._try(method, self._next(method, setting, num_computed))

    def _next(self, method: Method, setting: Setting, num_computed: int) -> Setting:
        """The setting with the threshold to try next."""
        low, high = (LOW, float(self.known.num_steps)), (HIGH, 1.0)
        for trial in self._tried(method):
            if _without_threshold(trial.setting) != setting:
                continue
            point = float(trial.setting[THRESHOLD]), trial.num_runs
            if point[1] > num_computed:
                low = max(low, point)
            else:
                high = min(high, point)
        share = (low[1] - num_computed) / max(low[1] - high[1], 1e-9)
        share = min(max(share, _EDGE), 1 - _EDGE)
        threshold = math.exp((1 - share) * math.log(low[0]) + share * math.log(high[0]))
        return {**setting, THRESHOLD: float(f"{threshold:.4g}")}

    def _try(self, method: Method, setting: Setting) -> None:
        key = method.name, tuple(sorted(setting.items()))
        if key in self._trials:
            return
        self._trials[key] = Trial(setting, *self._attempt(method.open(setting, self.known)))

    def _best_of(self, method: Method, num_computed: int) -> Trial | None:
        cheap = [trial for trial in self._tried(method) if trial.num_runs <= num_computed]
        return max(cheap, key=lambda trial: trial.psnr_db, default=None)

    def _tried(self, method: Method) -> list[Trial]:
        return [trial for (name, _), trial in self._trials.items() if name == method.name]


def _without_threshold(setting: Setting) -> Setting:
    return {name: value for name, value in setting.items() if name != THRESHOLD}


def _spread(settings: Sequence[Setting], number: int) -> list[Setting]:
    """So many of them, evenly from first to last."""
    if len(settings) <= number:
        return list(settings)
    return [settings[index * len(settings) // number] for index in range(number)]


@torch.inference_mode()
def calibrated(subject: Subject, sampling: Sampling, wishes: Sequence[Wish]) -> Calibrated:
    """What methods must know beforehand, measured on uncached pictures."""
    total: Calibration | None = None
    model: Measured | None = None
    ratios: list[tuple[float, ...]] = []
    for part in subject.batches(wishes):
        with ExitStack() as stack:
            rows = subject.rows(stack, part, sampling, None)
            found = calibrate(subject.denoiser, rows, subject.pools)
            if total is None:
                total = found
            else:
                total.merge(found)
            model = measured(total, rows[0])
        if isinstance(subject.denoiser.model, SpanModel):
            ratios += _span_ratios(subject, sampling, part)
    assert total is not None, "there is a wish"
    assert model is not None
    by_level = {Level.VELOCITY.value: total.magnitude_ratios}
    if ratios:
        by_level[Level.SPAN.value] = tuple(map(fmean, zip(*ratios, strict=True)))
    polynomial = fit_rescaling(total.input_distances, total.output_distances) if ratios else ()
    return Calibrated(measured=model, polynomial=polynomial, ratios=by_level)


class _Always(Gate):
    """Computes every step, so that what is kept can be read."""

    def wants_compute(self, step: int, distance: float) -> bool:
        return True


def _span_ratios(
    subject: Subject, sampling: Sampling, wishes: Sequence[Wish]
) -> list[tuple[float, ...]]:
    """MagCache's ratios of what the blocks add to each prompt's hidden states."""
    method = CacheMethod(
        open_gate=lambda _: _Always(), extrapolator=DividedDifferences(), level=Level.SPAN
    )
    norms: list[Tensor] = []
    with ExitStack() as stack:
        rows = subject.rows(stack, wishes, sampling, method)
        while not rows[0].is_done:
            subject.denoiser.step(rows)
            norms.append(torch.stack([_kept(row).norm(dim=-1) for row in rows]))
    norms_NBT = torch.stack(norms)
    ratios_NB = (norms_NBT[1:] / (norms_NBT[:-1] + 1e-8)).flatten(2).mean(2)
    return [(1.0, *ratios.tolist()) for ratios in ratios_NB.T]


def _kept(row: DenoiseRow) -> Tensor:
    """What the blocks added last for the prompt of a row."""
    cache = row.branches[0].cache
    assert cache is not None
    memory = cache.known()
    return memory.pool.read(memory.cells[:1])[0]
