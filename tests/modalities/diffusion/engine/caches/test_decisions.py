"""The rules of the papers, by their computed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.caches.decisions import (
    FirstBlockGate,
    Gate,
    IntervalGate,
    MagCacheGate,
    TeaCacheGate,
    spread_ratios,
)
from triptych.modalities.diffusion.engine.caches.methods import (
    fit_rescaling,
    planned,
    rescaling_of,
    teacache,
)


def computed_steps(gate: Gate, num_steps: int, distances: Sequence[float] = ()) -> list[int]:
    steps = []
    for step in range(num_steps):
        if gate.wants_compute(step, distances[step] if distances else math.inf):
            gate.computed()
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("warmup", "num_steps", "expected"),
    [
        (9, 50, [*range(9), *range(10, 50, 5)]),  # MAX: 17
        (4, 50, [*range(4), *range(5, 50, 5)]),  # MAX's Wan: 13
        (9, 28, [*range(9), 10, 15, 20, 25]),  # MAX: 13
        (3, 28, [*range(3), 4, 9, 14, 19, 24]),  # diffusers: 8
        (3, 50, [*range(3), *range(4, 50, 5)]),  # diffusers: 13
    ],
)
def test_taylorseer_computes_where_max_and_diffusers_do(
    warmup: int, num_steps: int, expected: list[int]
) -> None:
    assert computed_steps(IntervalGate(5, warmup), num_steps) == expected


@given(st.lists(st.floats(0, 0.5), min_size=30, max_size=30), st.floats(0.01, 0.18))
def test_fluxs_polynomial_never_skips_below_its_least_value(
    distances: list[float], threshold: float
) -> None:
    flux = rescaling_of("FluxTransformer2DModel")
    assert computed_steps(TeaCacheGate(flux, threshold), 30, distances) == list(range(30))


@given(st.lists(st.floats(0, 0.5), min_size=30, max_size=30))
def test_fluxs_polynomial_skips_at_most_twice_at_max_default(distances: list[float]) -> None:
    flux = rescaling_of("FluxTransformer2DModel")
    steps = [-1, *computed_steps(TeaCacheGate(flux, 0.4), 30, distances), 30]
    assert all(after - before <= 3 for before, after in pairwise(steps))


def test_teacache_accumulates_and_resets() -> None:
    gate = TeaCacheGate((1.0, 0.0), 0.25)
    distances = [math.inf, 0.1, 0.1, 0.1, 0.2, 0.04, 0.02, 0.3]
    assert computed_steps(gate, 8, distances) == [0, 3, 6, 7]


def test_a_dip_below_zero_is_no_change() -> None:
    gate = TeaCacheGate((1.0, -0.1), 0.05)
    assert computed_steps(gate, 4, [math.inf, 0.0, 0.14, 0.02]) == [0]


def test_first_block_compares_with_its_threshold_each_time() -> None:
    distances = [math.inf, 0.04, 0.05, 0.051, 0.0]
    assert computed_steps(FirstBlockGate(0.05), 5, distances) == [0, 3]


def test_magcache_keeps_skips_and_error_bounded() -> None:
    steady = MagCacheGate((1.0,) * 20, threshold=0.06, max_skips=3, num_retained=4)
    assert computed_steps(steady, 20) == [0, 1, 2, 3, 7, 11, 15, 19]
    falling = MagCacheGate((0.97,) * 12, threshold=0.06, max_skips=3, num_retained=2)
    # 0.03, then 0.03 + 0.0591 is too much.
    assert computed_steps(falling, 12) == [0, 1, 3, 5, 7, 9, 11]


def test_ratios_spread_to_the_nearest_step() -> None:
    torch = pytest.importorskip("torch")
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS, nearest_interp

    ratios = [float(ratio) for ratio in FLUX_MAG_RATIOS]
    for num_steps in (1, 4, 20, 28, 50):
        theirs = nearest_interp(torch.tensor(ratios), num_steps)
        assert spread_ratios(ratios, num_steps) == pytest.approx(theirs.tolist())


def test_a_polynomial_is_found_again() -> None:
    polynomial = (3.0, -2.0, 0.5, 0.25, 0.01)
    inputs = [0.02 * step for step in range(1, 20)]
    outputs = [sum(c * x ** (4 - i) for i, c in enumerate(polynomial)) for x in inputs]
    assert fit_rescaling(inputs, outputs) == pytest.approx(polynomial)
    with pytest.raises(ValueError, match="5 different"):
        fit_rescaling([0.1, 0.1, 0.2], [1, 1, 2])


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(InvalidRequest, match="teacache_coefficients"):
        teacache("SanaTransformer2DModel", threshold=0.2)
    with pytest.raises(InvalidRequest, match="4 steps, not 5"):
        planned([True, False, False, True]).open_gate(5)
