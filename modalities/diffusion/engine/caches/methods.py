"""The step caches as settings: TeaCache, FBCache, TaylorSeer, MagCache and calibrated plans.

Owns a function per cache, with its defaults. Each returns a `CacheMethod`: the gate that decides
whether a step is computed, the extrapolator that predicts a skipped one, the predicted quantity
(`Level`), and the bounds of skipping. Owns TeaCache's polynomials and thresholds, published by
transformer class, and the fit of a polynomial to one model's measured distances. A polynomial maps
the distance of two steps' inputs to that of their outputs. Chooses no cache for a request
(`caches.choice` does) and runs no step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.caches.decisions import (
    Bounds,
    FirstBlockGate,
    Gate,
    IntervalGate,
    MagCacheGate,
    PlanGate,
    TeaCacheGate,
    spread_ratios,
)
from triptych.modalities.diffusion.engine.caches.extrapolation import (
    DividedDifferences,
    Extrapolator,
    StepTaylor,
)

RESCALING_DEGREE = 4
"""The degree of a polynomial, published or calibrated."""

# From the TeaCache repository: coefficients, highest power first, and the threshold that skips
# about as its authors recommend. Wan: those of the 1.3B text-to-video model.
_PUBLISHED: Mapping[str, tuple[tuple[float, ...], float]] = MappingProxyType(
    {
        "FluxTransformer2DModel": (
            (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861),
            0.4,
        ),
        "HiDreamImageTransformer2DModel": (
            (-31360.5009, -712.425503, 49.1363285, 8.2651549, 0.108053901),
            0.3,
        ),
        "Lumina2Transformer2DModel": (
            (393.76566581, -603.50993606, 209.10239044, -23.00726601, 0.86377344),
            0.2,
        ),
        "WanTransformer3DModel": (
            (2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774),
            0.07,
        ),
    }
)
_UNPUBLISHED: tuple[tuple[float, ...], float] = (), 0.2  # an estimated change of a fifth


def threshold_of(model_class: str) -> float:
    """The threshold for a class's published polynomial, or for any other polynomial."""
    return _PUBLISHED.get(model_class, _UNPUBLISHED)[1]


def rescaling_of(model_class: str) -> tuple[float, ...]:
    """The published polynomial of a transformer class; empty if there is none."""
    return _PUBLISHED.get(model_class, _UNPUBLISHED)[0]


def fit_rescaling(
    input_distances: Sequence[float], output_distances: Sequence[float]
) -> tuple[float, ...]:
    """The polynomial that maps input to output distances best, in least squares.

    Distances of neighbouring steps of uncached runs, from `measuring.Calibration`. Raises
    `ValueError` for fewer different inputs than coefficients.
    """
    if len(set(input_distances)) <= RESCALING_DEGREE:
        raise ValueError(f"{RESCALING_DEGREE + 1} different distances are needed.")
    coefficients = np.polyfit(input_distances, output_distances, RESCALING_DEGREE)
    return tuple(float(c) for c in coefficients)


class Level(enum.Enum):
    """The predicted quantity: the model's output, or the residual of its blocks.

    The first works for any model and costs nothing on skipped steps; the second needs a
    `SpanModel`, which runs a model without its blocks, and follows the latents more closely.
    """

    VELOCITY = "velocity"
    SPAN = "span"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMethod:
    """Settings of a step cache. `open_gate(num_steps)` creates the gate of a row."""

    open_gate: Callable[[int], Gate]
    extrapolator: Extrapolator
    level: Level
    bounds: Bounds = field(default_factory=Bounds)


def teacache(
    model_class: str,
    *,
    threshold: float,
    coefficients: Sequence[float] | None = None,
    level: Level = Level.SPAN,
) -> CacheMethod:
    """TeaCache. Raises `InvalidRequest` if no polynomial is known for the class and none given."""
    polynomial = tuple(coefficients or rescaling_of(model_class))
    if not polynomial:
        raise InvalidRequest(
            f"No TeaCache coefficients are known for {model_class}: give teacache_coefficients, or "
            "fit some with `triptych calibrate`.",
            param="teacache_coefficients",
        )
    return CacheMethod(
        open_gate=lambda num_steps: TeaCacheGate(polynomial, threshold),
        extrapolator=DividedDifferences(),
        level=level,
    )


def first_block(
    *, threshold: float = 0.05, order: int = 0, level: Level = Level.SPAN
) -> CacheMethod:
    """FBCache; with `order` above 0, skipped outputs are extrapolated instead of reused."""
    return CacheMethod(
        open_gate=lambda num_steps: FirstBlockGate(threshold),
        extrapolator=DividedDifferences(order),
        level=level,
    )


def taylorseer(
    *,
    interval: int = 5,
    order: int = 1,
    warmup: int = 9,
    by_step: bool = False,
    level: Level = Level.VELOCITY,
) -> CacheMethod:
    """TaylorSeer. `by_step` expands in the step number, as the paper does, not the noise level."""
    return CacheMethod(
        open_gate=lambda num_steps: IntervalGate(interval, warmup),
        extrapolator=StepTaylor(order) if by_step else DividedDifferences(order),
        level=level,
        bounds=Bounds(max_skips=max(8, interval)),
    )


def magcache(
    ratios: Sequence[float],
    *,
    threshold: float = 0.06,
    max_skips: int = 3,
    retention: float = 0.2,
    level: Level = Level.SPAN,
) -> CacheMethod:
    """MagCache. `ratios`: calibrated, for any number of steps. `retention`: share that computes."""

    def open_gate(num_steps: int) -> Gate:
        num_retained = int(retention * num_steps + 0.5)
        return MagCacheGate(spread_ratios(ratios, num_steps), threshold, max_skips, num_retained)

    return CacheMethod(open_gate=open_gate, extrapolator=DividedDifferences(), level=level)


def planned(plan: Sequence[bool], *, order: int = 1, level: Level = Level.VELOCITY) -> CacheMethod:
    """A plan from `planning.all_plans`. Raises `InvalidRequest` at another number of steps."""
    steps = tuple(plan)

    def open_gate(num_steps: int) -> Gate:
        if num_steps != len(steps):
            raise InvalidRequest(
                f"The cache plan is for {len(steps)} steps, not {num_steps}: calibrate one.",
                param="steps",
            )
        return PlanGate(steps)

    return CacheMethod(
        open_gate=open_gate,
        extrapolator=DividedDifferences(order),
        level=level,
        bounds=Bounds(max_skips=len(steps)),
    )
