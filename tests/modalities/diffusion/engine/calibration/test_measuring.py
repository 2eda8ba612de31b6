"""Calibration runs: what they measure, and that a plan made of them serves."""

from __future__ import annotations

import pytest
import torch

from support.denoiser_families import build, conditioning_of, sample_of
from support.denoiser_stubs import FOREIGN_CONFIGS, NATIVE_CONFIGS
from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.caches.extrapolation import DividedDifferences
from triptych.modalities.diffusion.engine.caches.methods import CacheMethod, fit_rescaling, planned
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.calibration.measuring import calibrate, error_model
from triptych.modalities.diffusion.engine.calibration.planning import all_plans
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

FLOW = NATIVE_CONFIGS["flow euler"]
NAME = "SD3Transformer2DModel"


def open_row(
    pools: TensorPools,
    seed: int,
    num_steps: int = 12,
    cache: CacheMethod | None = None,
    config: dict[str, object] = FLOW,
    name: str = NAME,
) -> DenoiseRow:
    sample = start_row(
        sample_of(name, seed),
        config,
        Spacing(num_steps=num_steps),
        generator=torch.Generator(),
        pools=pools,
    )
    slot = RowCache(cache, num_steps, pools) if cache else None
    return DenoiseRow(
        sample=sample,
        branches=[GuidanceBranch(conditioning=conditioning_of(name, seed), cache=slot)],
    )


def finish(denoiser: Denoiser, row: DenoiseRow) -> torch.Tensor:
    while not row.is_done:
        denoiser.step([row])
    return row.sample.sample


def test_a_calibrated_plan_is_better_than_an_even_one() -> None:
    pools, denoiser = TensorPools(), Denoiser(open_model(build(NAME)))
    rows = [open_row(pools, seed) for seed in range(3)]
    calibration = calibrate(denoiser, rows, pools)
    assert calibration.num_runs == 3
    assert all(row.is_done for row in rows)
    plan = all_plans(error_model(calibration, rows[0]), DividedDifferences(1), 7)[7]
    even = [step % 2 == 0 or step == 11 for step in range(12)]
    assert sum(plan) == sum(even) == 7
    errors = []
    for steps in (plan, even):
        cached = [finish(denoiser, open_row(pools, s, cache=planned(steps))) for s in range(3)]
        exact = [row.sample.sample for row in rows]
        errors.append(
            sum(float((a - b).square().mean()) for a, b in zip(cached, exact, strict=True))
        )
    assert errors[0] < errors[1]


def test_distances_are_those_teacache_gets() -> None:
    pools, denoiser = TensorPools(), Denoiser(open_model(build(NAME)))
    calibration = calibrate(denoiser, [open_row(pools, seed) for seed in range(2)], pools)
    assert len(calibration.input_distances) == len(calibration.output_distances) == 2 * 11
    assert all(0 < distance < 2 for distance in calibration.input_distances)
    polynomial = fit_rescaling(calibration.input_distances, calibration.output_distances)
    assert len(polynomial) == 5
    assert calibration.magnitude_ratios[0] == 1.0


def test_models_in_one_part_are_measured_without_inputs() -> None:
    name = "UNet2DConditionModel"
    pools, denoiser = TensorPools(), Denoiser(open_model(build(name)))
    row = open_row(pools, 1, num_steps=4, name=name)
    calibration = calibrate(denoiser, [row], pools)
    assert calibration.input_distances == []
    assert (calibration.gram.diagonal() > 0).all()
    row.release()
    assert pools.num_used == 0


def test_rows_that_differ_and_samplers_without_influence_are_refused() -> None:
    pools, denoiser = TensorPools(), Denoiser(open_model(build(NAME)))
    with pytest.raises(InvalidRequest, match="same steps"):
        calibrate(denoiser, [open_row(pools, 1), open_row(pools, 2, num_steps=5)], pools)
    foreign = open_row(pools, 1, num_steps=4, config=FOREIGN_CONFIGS["deis"])
    calibration = calibrate(denoiser, [foreign], pools)
    with pytest.raises(InvalidRequest, match="own samplers"):
        error_model(calibration, foreign)
