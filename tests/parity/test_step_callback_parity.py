"""A callback after each step sees and changes what one of diffusers' pipelines does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.diffusers_images import extras_of
from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from triptych.modalities.diffusion.api.step_callback import StepCallback
from triptych.modalities.diffusion.engine.caches.methods import planned
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.step_end import install_hook
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning"),
]
REQUEST = ImageRequest(
    prompt="A red apple", negative_prompt="blurry", width=64, height=96, num_steps=5, seed=11
)


class Watching:
    """Halves the latents after step 1, in place, and interrupts after step 3."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float, Tensor]] = []

    def __call__(
        self, owner: Any, step: int, timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self.seen.append((step, float(timestep), tensors["latents"].clone()))
        if step == 1:
            tensors["latents"] *= 0.5
        owner._interrupt = step == 3
        return tensors


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("FluxPipeline", 0),  # packed latents
        ("StableDiffusion3Pipeline", 0),  # two branches
        ("StableDiffusionPipeline", 1),  # a sampler with a history
    ],
)
def test_a_callback_is_that_of_diffusers(name: str, index: int) -> None:
    parts = {**components(name), "scheduler": SCHEDULERS[name][index]}
    recipe, pools, ours, others = open_recipe(name, parts), TensorPools(), Watching(), Watching()
    row, company = recipe.prepare(REQUEST, pools), recipe.prepare(REQUEST, pools)
    install_hook(StepCallback(ours), row, 0)
    denoiser = Denoiser(open_model(recipe.model))
    while not row.is_done:
        denoiser.step([company, row])
    modules = {part: value for part, value in parts.items() if part != "scheduler"}
    expected = their_pipeline(name, modules, parts["scheduler"])(
        prompt=REQUEST.prompt,
        width=REQUEST.width,
        height=REQUEST.height,
        num_inference_steps=REQUEST.num_steps,
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
        callback_on_step_end=others,
        **extras_of(name, REQUEST, recipe),
    ).images
    assert [seen[:2] for seen in ours.seen] == [seen[:2] for seen in others.seen]
    assert len(ours.seen) == 4
    for (_, _, found), (_, _, wanted) in zip(ours.seen, others.seen, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (row.sample.sample - expected[0]).abs().max() <= 1e-5 * expected.abs().max()
    assert not company.is_done
    for each in (row, company):
        each.release()
    assert pools.num_used == 0


def test_a_callback_is_called_after_steps_that_a_cache_skips() -> None:
    """They are taken one at a time then, with the same latents."""
    name, num_steps = "StableDiffusion3Pipeline", 5
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    recipe, pools, watching = open_recipe(name, parts), TensorPools(), Watching()
    cache = planned([step in {0, 4} for step in range(num_steps)])
    plain, row = (recipe.prepare(REQUEST, pools, cache=cache) for _ in range(2))

    def watch(owner: Any, step: int, timestep: float, tensors: dict[str, Any]) -> None:
        watching.seen.append((step, timestep, tensors["latents"]))

    install_hook(StepCallback(watch), row, 0)
    denoiser = Denoiser(open_model(recipe.model))
    for each in (plain, row):
        denoiser.advance([each], [1])
        denoiser.advance([each], [4])
    assert [step for step, *_ in watching.seen] == list(range(num_steps))
    torch.testing.assert_close(row.sample.sample, plain.sample.sample)
    torch.testing.assert_close(watching.seen[-1][2][0], row.sample.sample)
    for each in (row, plain):
        each.release()
