"""Edits through the runner: images and masks as they come over the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from support.image_runner import RunnerDriver, image_request, open_executor
from triptych.core.engine_api.pixels import Pixels
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes import qwen
from triptych.modalities.diffusion.engine.recipes.references import fit_within
from triptych.modalities.diffusion.plan import ImageKey, ImageRowResult
from triptych.modalities.diffusion.wire import ImageRequest, StepCache

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
SIDE = 64
IMAGE = Pixels(width=SIDE, height=SIDE, rgb=bytes(range(256)) * (SIDE * SIDE * 3 // 256))
LEFT = bytes([255] * (SIDE // 2) + [0] * (SIDE // 2)) * SIDE  # the half that changes


def edit(**fields: Any) -> ImageRequest:
    return image_request(sources=(IMAGE,), **fields)


def alone(executor: ImageExecutor, request: ImageRequest) -> Pixels:
    """Drawn by the recipe and the loop, no runner between."""
    row = executor.recipe.prepare(request, executor.pools, cache=executor.cache_of(request))
    denoiser = Denoiser(open_model(executor.recipe.model))
    while not row.is_done:
        denoiser.step([row])
    image = executor.recipe.decode(row.sample.sample, request)
    row.release()
    pixels = (image * 255).round().byte().permute(1, 2, 0).contiguous()
    return Pixels(width=SIDE, height=SIDE, rgb=pixels.numpy().tobytes())


def finish(driver: RunnerDriver, keys: list[ImageKey]) -> tuple[list[Pixels], dict[ImageKey, int]]:
    """All images, each from its first step to its last, and how often each was computed."""
    at = {key: driver.planned_steps[key].first_step for key in keys}
    computed = dict.fromkeys(keys, 0)
    while going := [key for key in keys if at[key] < driver.planned_steps[key].num_steps]:
        rows: tuple[ImageRowResult, ...] = driver.denoise(going)
        for key, row in zip(going, rows, strict=True):
            assert row.error is None
            at[key] += 1
            computed[key] += row.num_computed
    return driver.decode(keys), computed


@pytest.mark.parametrize("pipeline", ["FluxPipeline", "Flux2KleinPipeline"])
def test_edits_share_steps_with_images_from_words(pipeline: str) -> None:
    executor = open_executor(pipeline)
    requests = [
        image_request(),
        edit(strength=0.5),
        edit(mask=LEFT, seed=3),
        edit(mask=LEFT, strength=0.7, sampler="heun"),
        edit(prompt=""),
    ]
    expected = [alone(executor, request) for request in requests]
    driver = RunnerDriver(executor)
    keys = driver.encode(*requests)
    begins = [driver.planned_steps[key].first_step for key in keys]
    assert begins[:3] == [0, 3, 0]
    assert begins[3] > 0
    drawn, _ = finish(driver, keys)
    for ours, wanted in zip(drawn, expected, strict=True):
        apart = torch.frombuffer(bytearray(ours.rgb), dtype=torch.uint8).int() - torch.frombuffer(
            bytearray(wanted.rgb), dtype=torch.uint8
        )
        assert apart.abs().max() <= 1  # a value on the edge of two may be rounded either way
    driver.runner.close()


def test_a_plan_that_is_entered_midway_computes_where_it_enters() -> None:
    executor = open_executor("FluxPipeline")
    driver = RunnerDriver(executor)
    # Plans compute every third step: 0, 3, 6, 9 and the last.
    planned = StepCache(name="planned")
    whole = image_request(num_steps=12, cache=planned)
    late = edit(num_steps=12, strength=0.65, cache=planned)
    keys = driver.encode(whole, late)
    planned_steps = [driver.planned_steps[key] for key in keys]
    assert [step for step, rows in enumerate(planned_steps[0].num_rows) if rows] == [0, 3, 6, 9, 11]
    assert planned_steps[1].first_step == 4
    assert [step for step, rows in enumerate(planned_steps[1].num_rows) if rows] == [4, 6, 9, 11]
    _, computed = finish(driver, keys)
    assert list(computed.values()) == [5, 4]
    driver.runner.close()


@pytest.mark.parametrize(("height", "width"), [(1, 1), (5, 300), (2000, 3)])
def test_narrow_reference_images_keep_a_width(height: int, width: int) -> None:
    image = fit_within(torch.rand(3, height, width), 1024, 16)
    assert min(image.shape[1:]) >= 16
    assert not any(side % 16 for side in image.shape[1:])


@pytest.mark.parametrize(("height", "width"), [(2, 4000), (4000, 2)])
def test_a_mere_line_is_read_by_qwen_images_processor(height: int, width: int) -> None:
    for num_pixels in (qwen.CONDITION_IMAGE_SIZE, qwen.VAE_IMAGE_SIZE):
        _, *sides = qwen._sized(torch.rand(3, height, width), num_pixels).shape
        smart_resize(*sides)
