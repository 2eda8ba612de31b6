"""The compared step caches, and the settings that a search may give each.

Owns the free parameters of each method: where the prediction acts, its degree, and the method's
own criterion. All ranges are wider than those of a request, so that no method is restricted. The
rules are the product's own (`caches.methods`), which decide for each image and branch separately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import ClassVar, TypeAlias

import numpy as np
from typing_extensions import override

from triptych.modalities.diffusion.engine.caches.decisions import Bounds, Decisions
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    Level,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.calibration.planning import ErrorModel, all_plans

Setting: TypeAlias = Mapping[str, str | float]
"""The stored result of a search. Numbers of steps are also floats."""
THRESHOLD = "threshold"
LOW, HIGH = 1e-3, 10.0
"""The bounds of all thresholds."""
_ORDERS = (0, 1, 2)
_DAMPINGS = tuple(float(rate) for rate in np.linspace(0, 7, 8))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Calibrated:
    """The calibration of a model, measured on the images of the search.

    `ratios` are MagCache's at each level.
    """

    measured: ErrorModel
    polynomial: tuple[float, ...]
    ratios: Mapping[str, tuple[float, ...]]

    @property
    def num_steps(self) -> int:
        """Runs of the model for a branch of an uncached image."""
        return len(self.measured.points)

    @property
    def levels(self) -> list[str]:
        """Where a prediction may act."""
        return list(self.ratios)


class Method(ABC):
    """A step cache with open settings."""

    name: ClassVar[str]
    has_threshold: ClassVar[bool] = False
    needs_blocks: ClassVar[bool] = False  # to look between them

    @abstractmethod
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        """All settings that could compute about `num_computed` steps; any threshold is left out."""

    def open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        """The method with a complete setting. It may skip as long as its own rule does."""
        bounds = Bounds(max_skips=known.num_steps)
        return replace(self._open(setting, known), bounds=bounds)

    @abstractmethod
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod: ...


def count_runs(method: CacheMethod, num_steps: int) -> int:
    """How many of `num_steps` steps compute, for a rule that does not need the model."""
    rule = Decisions(method.open_gate, method.bounds, num_steps)
    return sum(rule.may_compute(range(num_steps)))


class Planned(Method):
    """Ours: the search for plans, whose error model has a damping, at any degree."""

    name = "planned"

    @override
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        for order, damping in product(_ORDERS, _DAMPINGS):
            yield {"order": order, "damping": damping, "computed": num_computed}

    @override
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        order = int(setting["order"])
        plans = _plans(known, order, float(setting["damping"]))
        return planned(plans[int(setting["computed"])], order=order)


@cache
def _plans(known: Calibrated, order: int, damping: float) -> Mapping[int, tuple[bool, ...]]:
    most = known.num_steps // 2 + 1
    return all_plans(known.measured.damped(damping), DividedDifferences(order), most)


class TaylorSeer(Method):
    """Computes at a fixed interval after a warm-up; expanded in the noise level, or in the step."""

    name = "TaylorSeer"

    @override
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        pairs = list(_intervals(known.num_steps, num_computed))
        for order, by_step, level in product(_ORDERS, (0, 1), known.levels):
            for warmup, interval in pairs:
                if order or not by_step:  # without a slope both are the same
                    yield {
                        "warmup": warmup,
                        "interval": interval,
                        "order": order,
                        "by_step": by_step,
                        "level": level,
                    }

    @override
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        return taylorseer(
            interval=int(setting["interval"]),
            order=int(setting["order"]),
            warmup=int(setting["warmup"]),
            by_step=bool(setting["by_step"]),
            level=Level(setting["level"]),
        )


def _intervals(num_steps: int, num_computed: int) -> Iterator[tuple[int, int]]:
    """For each warm-up the shortest interval within the budget, if it leaves one step at most."""
    for warmup in range(1, num_computed):
        for interval in range(1, num_steps):
            num_runs = count_runs(taylorseer(interval=interval, warmup=warmup), num_steps)
            if num_runs <= num_computed:
                if num_runs >= num_computed - 1:
                    yield warmup, interval
                break


class TeaCache(Method):
    """By the change of the first block's input, rescaled by a polynomial fitted to the model."""

    name = "TeaCache"
    has_threshold = True
    needs_blocks = True

    @override
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        for level, order in product(known.levels, (0, 1)):
            yield {"level": level, "order": order}

    @override
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        method = teacache(
            "",
            threshold=float(setting[THRESHOLD]),
            coefficients=known.polynomial,
            level=Level(setting["level"]),
        )
        return replace(method, extrapolator=DividedDifferences(int(setting["order"])))


class FBCache(Method):
    """By the change of the first block's residual."""

    name = "FBCache"
    has_threshold = True
    needs_blocks = True

    @override
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        for level, order in product(known.levels, (0, 1)):
            yield {"level": level, "order": order}

    @override
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        return first_block(
            threshold=float(setting[THRESHOLD]),
            order=int(setting["order"]),
            level=Level(setting["level"]),
        )


class MagCache(Method):
    """By measured magnitudes, of the blocks' residuals or of the outputs."""

    name = "MagCache"
    has_threshold = True

    @override
    def settings(self, known: Calibrated, num_computed: int) -> Iterator[Setting]:
        bounds = product((3, 8, known.num_steps), (0.0, 0.1, 0.2))
        for level, order, (max_skips, kept) in product(known.levels, (0, 1), bounds):
            setting = {"level": level, "order": order, "max_skips": max_skips, "kept": kept}
            cheapest = self.open({**setting, THRESHOLD: HIGH}, known)
            if count_runs(cheapest, known.num_steps) <= num_computed:
                yield setting

    @override
    def _open(self, setting: Setting, known: Calibrated) -> CacheMethod:
        method = magcache(
            known.ratios[str(setting["level"])],
            threshold=float(setting[THRESHOLD]),
            max_skips=int(setting["max_skips"]),
            retention=float(setting["kept"]),
            level=Level(setting["level"]),
        )
        return replace(method, extrapolator=DividedDifferences(int(setting["order"])))


METHODS: Sequence[Method] = (Planned(), TeaCache(), FBCache(), TaylorSeer(), MagCache())
