"""Predictions as weighted sums: exact where they must be, and what diffusers computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers.hooks.taylorseer_cache import TaylorSeerState
from hypothesis import given
from hypothesis import strategies as st

from triptych.modalities.diffusion.engine.caches.extrapolation import (
    DividedDifferences,
    Point,
    StepTaylor,
)

LEVELS = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4, unique_by=lambda x: round(x, 2))


@given(LEVELS, st.integers(0, 2), st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_polynomials_of_the_order_are_exact_at_uneven_levels(
    levels: list[float], order: int, coefficients: list[float]
) -> None:
    polynomial = np.polynomial.Polynomial(coefficients[: order + 1])
    known = [Point(step, level) for step, level in enumerate(levels[:3])][: order + 1]
    at = Point(9, levels[3])
    weights = DividedDifferences(order).weights(known, at)
    predicted = sum(w * polynomial(point.level) for w, point in zip(weights, known, strict=True))
    assert predicted == pytest.approx(polynomial(at.level), abs=1e-6 * max(map(abs, [1, *weights])))


def test_few_points_lower_the_order_and_equal_levels_count_once() -> None:
    at = Point(5, 0.2)
    assert DividedDifferences(2).weights([Point(0, 1.0)], at) == [1.0]
    twice = [Point(2, 0.5), Point(1, 0.5), Point(0, 0.8)]
    assert DividedDifferences(2).weights(twice, at) == pytest.approx([2.0, 0.0, -1.0])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 2), st.integers(1, 5))
def test_the_step_form_is_diffusers_taylorseer(gaps: list[int], order: int, ahead: int) -> None:
    state = TaylorSeerState(taylor_factors_dtype=torch.float64, max_order=order)
    values, points, step = [], [], 0
    for gap in gaps:
        value = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        state.current_step = step
        state.update((value,))
        values.insert(0, value)
        points.insert(0, Point(step, 1 - step / 100))
        step += gap
    state.current_step = points[0].step + ahead
    extrapolator = StepTaylor(order)
    kept = points[: extrapolator.num_kept]
    weights = extrapolator.weights(kept, Point(state.current_step, 0.0))
    ours = sum(w * value for w, value in zip(weights, values, strict=False))
    assert torch.allclose(torch.as_tensor(ours), state.predict()[0], atol=1e-10)


def test_the_step_form_is_exact_only_at_even_gaps() -> None:
    line = [Point(step, 0.0) for step in (10, 5, 0)]
    weights = StepTaylor(2).weights(line, Point(13, 0.0))
    assert sum(w * point.step for w, point in zip(weights, line, strict=True)) == pytest.approx(13)
    uneven = [Point(step, 0.0) for step in (10, 9, 0)]
    weights = StepTaylor(2).weights(uneven, Point(13, 0.0))
    square = sum(w * point.step**2 for w, point in zip(weights, uneven, strict=True))
    assert square != pytest.approx(169)
