"""Plans: the least of the stated bound, found; and worth having."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from support.denoiser_stubs import NATIVE_CONFIGS, MixtureFlow, begin, cached_step, finish, noise
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import planned
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.calibration.measuring import Calibration
from triptych.modalities.diffusion.engine.calibration.planning import (
    ErrorModel,
    all_plans,
    expected_error,
)
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

STEPS = 30


def uncached(model: MixtureFlow, seed: int, name: str, num_steps: int) -> tuple[Tensor, ErrorModel]:
    outputs: list[Tensor] = []

    def watched(samples: Tensor, times: Tensor) -> Tensor:
        outputs.append(model(samples, times)[0])
        return outputs[-1][None]

    row = begin(NATIVE_CONFIGS[name], num_steps, seed, TensorPools())
    program = row.program
    assert program is not None
    sample = finish(row, watched)
    calibration = Calibration(len(outputs))
    calibration.add(outputs)
    return sample, ErrorModel.of(calibration.gram, program)


def with_plan(model: MixtureFlow, seed: int, plan: tuple[bool, ...], name: str) -> Tensor:
    pools = TensorPools()
    row = begin(NATIVE_CONFIGS[name], len(plan), seed, pools)
    slot = RowCache(planned(plan, order=1), len(plan), pools)
    while not row.is_done:
        cached_step([(row, slot)], model)
    return row.sample


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("num_computed", [2, 4, 6])
def test_the_search_finds_what_trying_all_plans_finds(order: int, num_computed: int) -> None:
    num_steps = 10
    _, measured = uncached(MixtureFlow(), 1, "flow euler", num_steps)
    extrapolator = DividedDifferences(order)

    def bound(computed: tuple[int, ...]) -> float:
        total = 0.0
        for index, until in enumerate(computed[1:]):
            known = tuple(reversed(computed[: index + 1]))[: extrapolator.num_kept]
            total += measured.length(measured.skip_error(extrapolator, known, until))
        return total

    middle = combinations(range(1, num_steps - 1), num_computed - 2)
    least = min(bound((0, *between, num_steps - 1)) for between in middle)
    plan = all_plans(measured, extrapolator, num_computed)[num_computed]
    assert sum(plan) == num_computed
    assert bound(tuple(np.flatnonzero(plan))) == pytest.approx(least)
    assert expected_error(measured, extrapolator, plan) <= least + 1e-12


@pytest.mark.parametrize("name", ["flow euler", "flow heun", "dpm++ 2m flow", "unipc flow"])
@pytest.mark.parametrize("order", [0, 1])
def test_predicted_error_is_first_order_exact(name: str, order: int) -> None:
    """Outputs replayed from an uncached run: then nothing is approximate, for any sampler."""
    pools = TensorPools()
    _, measured = uncached(MixtureFlow(), 2, name, 8)
    count = len(measured.points)
    outputs = [noise(100 + step) for step in range(count)]
    calibration = Calibration(count)
    calibration.add(outputs)
    measured = ErrorModel(
        gram_NN=calibration.gram, influence_N=measured.influence_N, points=measured.points
    )
    plan = tuple(step % 3 == 0 or step == count - 1 for step in range(count))

    def replay(skips: bool) -> Tensor:
        row = begin(NATIVE_CONFIGS[name], 8, 2, pools)
        slot = RowCache(planned(plan if skips else [True] * count, order=order), count, pools)
        while not row.is_done:
            cached_step([(row, slot)], lambda samples, times, k=row.step: outputs[k][None])
        return row.sample

    error = float((replay(True) - replay(False)).square().mean().sqrt())
    predicted = expected_error(measured, DividedDifferences(order), plan)
    assert predicted == pytest.approx(error, rel=1e-3)


def test_a_plan_beats_even_skipping_and_fewer_steps_at_equal_compute() -> None:
    model, name, num_computed = MixtureFlow(), "flow euler", 9
    runs = [uncached(model, 50 + seed, name, STEPS)[1] for seed in range(4)]
    measured = ErrorModel(
        gram_NN=np.mean([run.gram_NN for run in runs], axis=0),
        influence_N=runs[0].influence_N,
        points=runs[0].points,
    )
    plan = all_plans(measured, DividedDifferences(1), num_computed)[num_computed]
    even = np.linspace(0, STEPS - 1, num_computed).round().astype(int)
    even_plan = tuple(step in even for step in range(STEPS))
    for seed in range(4):
        exact, _ = uncached(model, seed, name, STEPS)
        fewer = finish(begin(NATIVE_CONFIGS[name], num_computed, seed, TensorPools()), model)
        ours, theirs = (with_plan(model, seed, p, name) for p in (plan, even_plan))
        error = (ours - exact).square().mean()
        assert error < 0.63 * (theirs - exact).square().mean()  # 2 dB
        assert error < 0.63 * (fewer - exact).square().mean()


def test_damping_spends_steps_where_errors_stay() -> None:
    _, measured = uncached(MixtureFlow(), 1, "flow euler", 30)
    middles = []
    for rate in (0.0, 2.0, 4.0):
        plan = all_plans(measured.damped(rate), DividedDifferences(), 8)[8]
        middles.append(float(np.flatnonzero(plan).mean()))
    assert middles == sorted(middles)  # later and later
    assert middles[0] < middles[-1]
    levels = np.array([point.level for point in measured.points])
    damped = measured.damped(2.0).influence_N
    np.testing.assert_allclose(damped, measured.influence_N * np.exp(-2 * levels))


def test_impossible_plans_and_runs_are_left_out_or_refused() -> None:
    _, measured = uncached(MixtureFlow(), 1, "flow euler", 10)
    assert 3 not in all_plans(measured, DividedDifferences(), 4, max_skips=2)
    with pytest.raises(ValueError, match="10 steps"):
        Calibration(10).add([torch.zeros(2)] * 9)


def test_calibration_averages_runs_and_measures_what_magcache_wants() -> None:
    calibration = Calibration(3)
    for scale in (1.0, 3.0):
        outputs = [scale * factor * torch.ones(4, 2) for factor in (1.0, 2.0, 1.0)]
        calibration.add(outputs, input_distances=[1.0, 0.5])
    assert calibration.gram[0].tolist() == pytest.approx([5.0, 10.0, 5.0])
    assert calibration.magnitude_ratios == pytest.approx([1.0, 2.0, 0.5])
    assert calibration.input_distances == pytest.approx([1.0, 0.5] * 2)
    assert calibration.output_distances == pytest.approx(calibration.input_distances)
