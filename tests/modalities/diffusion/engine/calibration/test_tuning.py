"""A calibration from end to end: plans are tried, and their reported quality is real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.diffusers_pipelines import FLOW, components
from triptych.core.errors import InvalidRequest, NonFinite
from triptych.modalities.diffusion.engine.caches.methods import planned
from triptych.modalities.diffusion.engine.calibration.tuning import PEAK_DB, Tuned, Tuner, psnr_db
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.wire import ImageRequest

HEUN = {"_class_name": "FlowMatchHeunDiscreteScheduler", "shift": 2.0}


def requests(num: int = 3, num_steps: int = 10) -> list[ImageRequest]:
    return [
        ImageRequest(prompt=word, width=32, height=32, num_steps=num_steps, seed=seed)
        for seed, word in enumerate(["red", "blue", "green"][:num])
    ]


def recipe_of(name: str, scheduler: dict[str, Any]) -> Recipe:
    return open_recipe(name, {**components(name), "scheduler": scheduler})


def tune(recipe: Recipe, images: list[ImageRequest], **options: Any) -> Tuned:
    fractions: list[float] = []
    tuner = Tuner(recipe, Denoiser(open_model(recipe.model)), batch_size=2)
    tuned = tuner.tune(images, fractions.append, **options)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert tuner._pools.num_used == 0
    return tuned


@pytest.fixture(scope="module")
def sd3() -> Recipe:
    return recipe_of("StableDiffusion3Pipeline", FLOW)


@pytest.fixture(scope="module")
def tuned(sd3: Recipe) -> Tuned:
    return tune(sd3, requests())


def test_plans_of_many_budgets_are_tried(tuned: Tuned) -> None:
    run = tuned.run
    assert [len(plan.computed) for plan in run.plans] == [2, 3, 4, 5, 6]
    assert len(tuned.speedups) == len(run.plans)
    assert all(speedup > 0 for speedup in tuned.speedups)
    for plan in run.plans:
        assert (plan.computed[0], plan.computed[-1]) == (0, 9)
        assert 5 < plan.low_psnr_db <= plan.median_psnr_db <= PEAK_DB
    assert run.plans[-1].low_psnr_db > run.plans[0].low_psnr_db
    assert run.plans[-1].expected_error < run.plans[0].expected_error


def test_what_it_was_measured_with_is_written_down(tuned: Tuned) -> None:
    run = tuned.run
    assert (run.num_steps, run.num_evaluations, run.sampler) == (10, 10, "")
    assert (run.num_images, run.width, run.height) == (3, 32, 32)
    assert (len(run.ratios), len(run.polynomial)) == (10, 5)


def test_the_reported_quality_of_a_plan_is_that_of_its_image(sd3: Recipe, tuned: Tuned) -> None:
    plan = tuned.run.plans[2]
    mask = [step in plan.computed for step in range(10)]
    found = []
    for request in requests():
        generated = []
        for method in (None, planned(mask, order=plan.order)):
            pools, denoiser = TensorPools(), Denoiser(open_model(sd3.model))
            row = sd3.prepare(request, pools, cache=method)
            while not row.is_done:
                denoiser.step([row])
            generated.append(sd3.decode(row.sample.sample, request))
        found.append(psnr_db(generated[0], generated[1]))
    assert plan.median_psnr_db == pytest.approx(sorted(found)[1], abs=0.05)


def test_models_that_run_as_a_whole_have_plans_and_no_polynomial() -> None:
    scheduler = {"_class_name": "DDIMScheduler", "steps_offset": 1, "clip_sample": False}
    recipe = recipe_of("StableDiffusionPipeline", scheduler)
    run = tune(recipe, requests(num=1, num_steps=6), shares=(0.5,)).run
    assert run.polynomial == ()
    assert [len(plan.computed) for plan in run.plans] == [3]


def test_a_sampler_of_two_runs_a_step_is_planned_by_runs() -> None:
    run = tune(recipe_of("StableDiffusion3Pipeline", HEUN), requests(num=1, num_steps=4)).run
    assert (run.num_steps, run.num_evaluations) == (4, 7)
    assert all(plan.computed[-1] == 6 for plan in run.plans)


def test_too_few_steps_and_foreign_samplers_are_refused(sd3: Recipe) -> None:
    with pytest.raises(InvalidRequest, match="None of 2 steps can be skipped"):
        tune(sd3, requests(num=1, num_steps=2))
    pndm = recipe_of("StableDiffusionPipeline", {"_class_name": "PNDMScheduler"})
    with pytest.raises(InvalidRequest, match="own samplers"):
        tune(pndm, requests(num=1))


def test_errors_are_in_decibels() -> None:
    one = torch.zeros(3, 4, 4)
    assert psnr_db(one, one + 0.1) == pytest.approx(20.0)
    assert psnr_db(one, one) == PEAK_DB
    with pytest.raises(NonFinite, match="another --dtype"):
        psnr_db(one, one * float("nan"))
