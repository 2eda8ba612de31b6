"""Whole images: our prepare, step and decode against diffusers' pipelines, the cache off."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from support.diffusers_images import request_for, theirs
from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from support.tiers import nightly
from support.tiny_autoencoders import randomized
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.engine.caches.methods import first_block, planned
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes.recipe import row_seed
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning"),
]
REQUEST = ImageRequest(
    prompt="A red apple", negative_prompt="blurry", width=64, height=96, num_steps=3, seed=11
)
EVERY_SAMPLER = ("StableDiffusion3Pipeline", "StableDiffusionXLPipeline", "FluxPipeline")
"""Pipelines of each kind of schedules."""
CASES = [
    (name, index) if index == 0 or name in EVERY_SAMPLER else nightly(name, index)
    for name, found in SCHEDULERS.items()
    for index in range(len(found))
    if not (spec_of(name).needs_reference or spec_of(name).needs_mask)
]


def run(denoiser: Denoiser, rows: list[DenoiseRow]) -> None:
    while running := [row for row in rows if not row.is_done]:
        denoiser.step(running)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_images_are_those_of_diffusers(name: str, index: int) -> None:
    """With each pipeline's first sampler to the image, with the others to the latents."""
    parts = {**components(name), "scheduler": SCHEDULERS[name][index]}
    recipe, pools = open_recipe(name, parts), TensorPools()
    request = request_for(name, REQUEST)
    # Batched with another prompt, seed and number of steps, one step ahead.
    other = replace(request, prompt="Two penguins by a house", seed=5, num_steps=4)
    denoiser = Denoiser(open_model(recipe.model))
    rows = [recipe.prepare(other, pools), recipe.prepare(request, pools)]
    denoiser.step(rows[:1])
    run(denoiser, rows)
    ours = recipe.to_latents(rows[1].sample.sample, request)
    if index == 0:
        ours = recipe.decode(rows[1].sample.sample, request)
        num_channels = 4 if name == "QwenImage21Pipeline" else 3
        assert ours.shape == (num_channels, request.height, request.width)
    expected = theirs(name, parts, request, "pt" if index == 0 else "latent")
    if expected.ndim == 2:
        expected = recipe.to_latents(expected, request)
    tolerance = 3e-5 if index == 0 else 1e-5  # random decoders enlarge the latents' rounding
    assert (ours - expected).abs().max() <= tolerance * expected.abs().max()
    for row in rows:
        row.release()
    assert pools.num_used == 0


def test_the_medium_model_of_sd35_has_blocks_of_its_own() -> None:
    name = "StableDiffusion3Pipeline"
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    config = {**parts["transformer"].config, "qk_norm": "rms_norm", "dual_attention_layers": (0, 1)}
    config.pop("_use_default_values", None)  # these may be asked for
    parts["transformer"] = randomized(type(parts["transformer"]).from_config(config))
    recipe, pools = open_recipe(name, parts), TensorPools()
    row = recipe.prepare(REQUEST, pools)
    run(Denoiser(open_model(recipe.model)), [row])
    expected = theirs(name, parts, REQUEST, "latent")
    assert (row.sample.sample - expected).abs().max() <= 1e-5 * expected.abs().max()
    row.release()


def test_flux_without_guidance_embedding_runs_two_branches() -> None:
    name, scheduler = "FluxPipeline", SCHEDULERS["FluxPipeline"][0]
    parts = components(name)
    config = {**parts["transformer"].config, "guidance_embeds": False}
    parts["transformer"] = randomized(type(parts["transformer"]).from_config(config))
    recipe, pools = open_recipe(name, {**parts, "scheduler": scheduler}), TensorPools()
    row = recipe.prepare(replace(REQUEST, guidance_scale=2.5), pools)
    assert len(row.branches) == 2
    run(Denoiser(open_model(recipe.model)), [row])
    expected = their_pipeline(name, parts, scheduler)(
        prompt=REQUEST.prompt,
        negative_prompt=REQUEST.negative_prompt,
        true_cfg_scale=2.5,
        width=REQUEST.width,
        height=REQUEST.height,
        num_inference_steps=REQUEST.num_steps,
        generator=torch.Generator().manual_seed(REQUEST.seed),
        output_type="latent",
    ).images[0]
    assert (row.sample.sample - expected).abs().max() <= 1e-5 * expected.abs().max()
    row.release()


def test_distilled_hunyuan_takes_its_scale_and_the_next_time() -> None:
    name = "HunyuanImagePipeline"
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    for guider in ("guider", "ocr_guider"):
        del parts[guider]
    config = {**parts["transformer"].config, "guidance_embeds": True, "use_meanflow": True}
    config.pop("_use_default_values")  # these are asked for
    parts["transformer"] = randomized(type(parts["transformer"]).from_config(config))
    recipe, pools = open_recipe(name, parts), TensorPools()
    row = recipe.prepare(REQUEST, pools)
    assert len(row.branches) == 1
    run(Denoiser(open_model(recipe.model)), [row])
    expected = theirs(name, parts, REQUEST, "latent")
    assert (row.sample.sample - expected).abs().max() <= 1e-5 * expected.abs().max()
    row.release()


@pytest.mark.parametrize(
    "name",
    ["ErnieImagePipeline", "GlmImagePipeline", "HunyuanImagePipeline", "LongCatImagePipeline"],
)
def test_in_bfloat16_the_error_is_that_of_diffusers(name: str) -> None:
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    request = request_for(name, REQUEST)
    exact = theirs(name, parts, request, "latent")
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    recipe, pools = open_recipe(name, parts), TensorPools()
    row = recipe.prepare(request, pools)
    run(Denoiser(open_model(recipe.model)), [row])
    ours, others = (
        (found.view(exact.shape).float() - exact).norm() / exact.norm()
        for found in (row.sample.sample, theirs(name, parts, request, "latent"))
    )
    assert ours < 1.2 * others
    assert ours < 0.05
    row.release()


def test_images_asked_for_together_differ_and_the_first_is_the_seeds_own() -> None:
    seeds = {row_seed(seed, index) for seed in (7, 8) for index in range(50)}
    assert len(seeds) == 100
    assert row_seed(7, 0) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sizes_that_do_not_fit_and_unknown_pipelines_are_named() -> None:
    parts = {**components("FluxPipeline"), "scheduler": SCHEDULERS["FluxPipeline"][0]}
    recipe, pools = open_recipe("FluxPipeline", parts), TensorPools()
    assert recipe.pixel_multiple == 16
    with pytest.raises(InvalidRequest, match=r"multiples of 16.*not 1000x72"):
        recipe.prepare(replace(REQUEST, width=1000, height=72), pools)
    with pytest.raises(WeightsError, match="MysteryPipeline is not served"):
        open_recipe("MysteryPipeline", parts)
    assert pools.num_used == 0


def test_branches_skip_by_their_own_caches_and_come_close() -> None:
    name, num_steps = "StableDiffusion3Pipeline", 10
    parts = {**components(name), "scheduler": SCHEDULERS[name][0]}
    recipe, pools = open_recipe(name, parts), TensorPools()
    request = replace(REQUEST, num_steps=num_steps, guidance_scale=2.0)
    denoiser = Denoiser(open_model(recipe.model))
    exact = recipe.prepare(request, pools)
    run(denoiser, [exact])
    for cache in (
        first_block(threshold=0.5),
        planned([step not in {3, 5, 7} for step in range(num_steps)]),
    ):
        row = recipe.prepare(request, pools, cache=cache)
        run(denoiser, [row])
        slots = [branch.cache for branch in row.branches]
        assert len({id(slot) for slot in slots}) == 2
        assert all(slot is not None and slot.decisions.num_skipped > 0 for slot in slots)
        apart = (row.sample.sample - exact.sample.sample).square().mean()
        assert apart < 0.05 * exact.sample.sample.square().mean()
        row.release()
    exact.release()
    assert pools.num_used == 0
