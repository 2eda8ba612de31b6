"""What the API says of a pipeline, and what its recipe does."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.diffusers_pipelines import components
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.engine.recipes.references import ReferenceRecipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.spec import PIPELINES, downscale, spec_of
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


@pytest.mark.parametrize("name", PIPELINES)
def test_recipes_agree(name: str) -> None:
    recipe = open_recipe(name, {**components(name), "scheduler": SCHEDULER})
    spec = spec_of(name, recipe.model.config)
    assert recipe.spec == spec
    assert isinstance(recipe, ReferenceRecipe) == (spec.max_references > 0)
    assert spec.is_guided(2 * spec.default_guidance) == spec.has_negative
    side = 4 * recipe.pixel_multiple
    request = ImageRequest(prompt="", width=side, height=2 * side)
    noise = torch.zeros(recipe.latent_shape(request))
    latents = recipe.to_latents(recipe.to_sample(noise), request)
    assert latents.shape[1] == 2 * latents.shape[2] == 8 * spec.patch


def test_all_but_an_older_name_are_of_diffusers() -> None:
    assert [name for name in PIPELINES if not hasattr(diffusers, name)] == [
        "Lumina2Text2ImgPipeline"
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MysteryPipeline", "its steps are not implemented"),
        ("FluxControlNetPipeline", "it needs control or example images"),
        (
            "StableDiffusion3PAGImg2ImgPipeline",
            "its weights are served where model_index.json names StableDiffusion3Pipeline",
        ),
        ("StableDiffusionInpaintPipeline", "its UNet takes the mask as channels"),
        ("StableDiffusionXLImg2ImgPipeline", "it enlarges or refines the images of another model"),
        ("HunyuanImageRefinerPipeline", "it enlarges or refines the images of another model"),
    ],
)
def test_other_pipelines_are_refused_with_a_reason(name: str, reason: str) -> None:
    with pytest.raises(WeightsError, match=f"^{name} is not served: .*{reason}"):
        spec_of(name)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("FluxImg2ImgPipeline", "FluxPipeline"),
        ("Flux2KleinInpaintPipeline", "Flux2KleinPipeline"),
        ("QwenImageEditInpaintPipeline", "QwenImageEditPipeline"),
        ("StableDiffusionImg2ImgPipeline", "StableDiffusionPipeline"),
    ],
)
def test_pipelines_that_change_images_are_served_as_those_that_make_them(
    name: str, plain: str
) -> None:
    parts = {**components(plain), "scheduler": SCHEDULER}
    recipe, other = open_recipe(name, parts), open_recipe(plain, parts)
    assert (type(recipe), recipe.spec) == (type(other), other.spec)


def test_guidance_without_an_embedding_needs_two_branches() -> None:
    with_embeds = spec_of("FluxPipeline", {"guidance_embeds": True})
    assert not with_embeds.is_guided(3.5)
    without_embeds = spec_of("FluxPipeline", {"guidance_embeds": False})
    assert without_embeds.has_negative
    assert without_embeds.is_guided(3.5)
    assert not without_embeds.is_guided(without_embeds.default_guidance)


def test_a_distilled_model_has_one_branch() -> None:
    assert spec_of("Flux2KleinPipeline").is_guided(4.0)
    assert not spec_of("Flux2KleinPipeline", {}, {"is_distilled": True}).is_guided(4.0)


def test_model_file_may_set_defaults() -> None:
    own = spec_of("FluxPipeline", {}, {"default_steps": 9, "default_guidance": 2.5})
    assert (own.default_steps, own.default_guidance) == (9, 2.5)


# As published: autoencoder and model of SD 1.5, SDXL, Sana 1024, SD3.5, FLUX.1 and Wan 2.1.
PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any], int, tuple[int, int]]] = [
    (
        "StableDiffusionPipeline",
        {"sample_size": 64},
        {"block_out_channels": [1] * 4},
        8,
        (512, 512),
    ),
    (
        "StableDiffusionXLPipeline",
        {"sample_size": 128},
        {"block_out_channels": [1] * 4},
        8,
        (1024,) * 2,
    ),
    ("SanaPipeline", {"sample_size": 32}, {"encoder_block_out_channels": [1] * 6}, 32, (1024,) * 2),
    (
        "StableDiffusion3Pipeline",
        {"sample_size": 128},
        {"block_out_channels": [1] * 4},
        16,
        (1024,) * 2,
    ),
    ("FluxPipeline", {}, {"block_out_channels": [1] * 4}, 16, (1024, 1024)),
    ("WanPipeline", {}, {"temperal_downsample": [False, True, True]}, 16, (832, 480)),
]


@pytest.mark.parametrize(("name", "model", "vae", "multiple", "size"), PUBLISHED)
def test_sizes_come_of_the_files(
    name: str, model: dict[str, Any], vae: dict[str, Any], multiple: int, size: tuple[int, int]
) -> None:
    spec = spec_of(name)
    assert spec.pixel_multiple(vae) == multiple == downscale(vae) * spec.patch
    assert spec.default_size(model, vae, {}) == size
    assert spec.default_size(model, vae, {"default_size": 128}) == (128, 128)


@given(
    name=st.sampled_from(sorted(PIPELINES)),
    num_steps=st.integers(1, 100),
    strength=st.floats(0, 1),
)
def test_more_strength_never_begins_later(name: str, num_steps: int, strength: float) -> None:
    spec = spec_of(name)
    first = spec.first_step(num_steps, strength)
    assert 0 <= first <= num_steps
    assert spec.first_step(num_steps, 1.0) == 0
    assert spec.first_step(num_steps, min(1.0, strength + 0.1)) <= first
    checked = {"num_steps": num_steps, "strength": strength, "has_mask": spec.needs_mask}
    if first < num_steps:
        spec.check_images(1, **checked)
    else:
        with pytest.raises(InvalidRequest):
            spec.check_images(1, **checked)


@pytest.mark.parametrize(
    ("name", "num_images", "message"),
    [
        ("FluxFillPipeline", 1, "fills the masked part of an image: send an image and a mask"),
        ("QwenImageEditPipeline", 0, "edits images: send one"),
        ("FluxPipeline", 2, "2 images are too many: this model takes at most 1"),
        ("Flux2KleinPipeline", 11, "11 images are too many: this model takes at most 10"),
    ],
)
def test_too_many_and_too_few_images(name: str, num_images: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        spec_of(name).check_images(num_images, num_steps=4, strength=None, has_mask=False)
