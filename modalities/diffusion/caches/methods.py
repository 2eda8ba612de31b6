"""The step caches there are, as data: a rule, a prediction, and the bounds every rule lives in."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.caches.extrapolation import (
    DividedDifferences,
    Extrapolator,
    StepTaylor,
)
from triptych.modalities.diffusion.caches.gates import (
    FirstBlockGate,
    Gate,
    IntervalGate,
    MagCacheGate,
    PlanGate,
    TeaCacheGate,
    spread_ratios,
)
from triptych.modalities.diffusion.caches.rescaling import rescaling_of


class Level(enum.Enum):
    """What is predicted: the model's output, or what its blocks add to the hidden states.

    The first works for any model and costs nothing when skipping; the second needs an adapter that
    can run a model without its blocks, and follows the latents more closely.
    """

    VELOCITY = "velocity"
    SPAN = "span"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What holds for every rule: the first step computes, so may the last; skips end some time."""

    max_skips: int = 8
    forces_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMethod:
    """A step cache's settings. `open_gate(num_steps)` gives a row its own rule."""

    open_gate: Callable[[int], Gate]
    extrapolator: Extrapolator
    level: Level
    bounds: Bounds = Bounds()


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
    """FBCache; with `order` above 0, what is skipped is extrapolated instead of reused."""
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
    """TaylorSeer. `by_step` expands in the step's number as the paper does, not the noise level."""
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
    """MagCache. `ratios` as calibrated, at any number of steps; `retention` the share kept."""

    def open_gate(num_steps: int) -> Gate:
        num_retained = int(retention * num_steps + 0.5)
        return MagCacheGate(spread_ratios(ratios, num_steps), threshold, max_skips, num_retained)

    return CacheMethod(open_gate=open_gate, extrapolator=DividedDifferences(), level=level)


def planned(plan: Sequence[bool], *, order: int = 1, level: Level = Level.VELOCITY) -> CacheMethod:
    """A plan from `planning.plan_steps`. Raises `InvalidRequest` at another number of steps."""
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
