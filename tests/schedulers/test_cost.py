"""The filter behind predicted seconds, against the recursion as the book has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.schedulers.cost import CostModel

DRIFT, VARIANCE_OF_NONE, VARIANCE = 0.0025, 1e1, 1e3

steps = st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 512), st.floats(0.001, 0.01)),
    min_size=1,
    max_size=7,  # from the eighth step on, surprising seconds count as noise
)


def fitted(works: list[tuple[int, int]], seconds: list[float]) -> np.ndarray:
    """Weights of the constant and of both counts, after recursive least squares."""
    scale = np.maximum(np.abs(works[0]), 1)
    weights, covariance = np.zeros(3), np.diag([VARIANCE_OF_NONE, VARIANCE, VARIANCE])
    for place, (work, taken_s) in enumerate(zip(works, seconds, strict=True)):
        if place == 1:  # the first step was not representative
            weights, covariance = np.zeros(3), np.diag([VARIANCE_OF_NONE, VARIANCE, VARIANCE])
        features = np.array([1.0, *(np.array(work) / scale)])
        gain = covariance @ features / (1 + features @ covariance @ features)
        weights = weights + gain * (taken_s - features @ weights)
        covariance = covariance - np.outer(gain, features @ covariance)
        covariance = covariance + DRIFT * np.outer(features, features) / (features @ features) ** 2
    return weights / np.array([1.0, *scale])


@given(steps)
def test_seconds_follow_the_recursion(taken: list[tuple[int, int, float]]) -> None:
    costs = CostModel()
    for rows, tokens, seconds in taken:
        costs.observe("mixed", {"rows": rows, "tokens": tokens}, seconds)
    weights = fitted([each[:2] for each in taken], [each[2] for each in taken])
    fastest_s = min(each[2] for each in (taken[1:] or taken))
    expected_s = max(float(weights @ [1.0, 20.0, 100.0]), fastest_s / 4)
    found_s = costs.trend("mixed", {"rows": 20, "tokens": 100})
    assert found_s == pytest.approx(expected_s, rel=1e-6, abs=1e-9)


def test_a_repeated_work_is_predicted_by_the_lower_median_of_the_latest() -> None:
    costs = CostModel()
    for seconds in (9.0, 4.0, 1.0, 3.0, 2.0, 7.0):
        costs.observe("decode", {"rows": 4}, seconds)
    assert costs.measured_s("decode", {"rows": 4}) == 3.0
    costs = CostModel()
    for seconds in (5.0, 2.0):
        costs.observe("decode", {"rows": 4}, seconds)
    assert costs.measured_s("decode", {"rows": 4}) == 2.0
