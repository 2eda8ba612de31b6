"""Images from images: our rows against diffusers' img2img and inpaint pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext, pipeline_flux_kontext_inpaint
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from diffusers.pipelines.wan import pipeline_wan_video2video
from msgspec.structs import replace
from PIL import Image
from torch import Tensor

from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from support.tiers import first, nightly
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InvalidRequest
from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    Level,
    first_block,
    planned,
)
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.recipes import longcat, packed, qwen
from triptych.modalities.diffusion.engine.recipes.latents import (
    decode_latents,
    encode_image,
    image_tensor,
)
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*upcast_vae.*:FutureWarning"),
]
WIDTH, HEIGHT = 64, 96
IMG2IMG = {
    "ChromaPipeline": "ChromaImg2ImgPipeline",
    "FluxPipeline": "FluxImg2ImgPipeline",
    "QwenImagePipeline": "QwenImageImg2ImgPipeline",
    "SanaSprintPipeline": "SanaSprintImg2ImgPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3Img2ImgPipeline",
    "StableDiffusionPipeline": "StableDiffusionImg2ImgPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLImg2ImgPipeline",
    "WanPipeline": "WanVideoToVideoPipeline",
    "ZImagePipeline": "ZImageImg2ImgPipeline",
}
INPAINT = {
    "ChromaPipeline": "ChromaInpaintPipeline",
    "Flux2KleinPipeline": "Flux2KleinInpaintPipeline",
    "FluxFillPipeline": "FluxFillPipeline",
    "FluxKontextPipeline": "FluxKontextInpaintPipeline",
    "FluxPipeline": "FluxInpaintPipeline",
    "QwenImagePipeline": "QwenImageInpaintPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3InpaintPipeline",
    "StableDiffusionPipeline": "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLInpaintPipeline",
    "ZImagePipeline": "ZImageInpaintPipeline",
}
REFERRING = [
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "FluxKontextPipeline",
    "LongCatImageEditPipeline",
    "QwenImage21Pipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
]


def generated(seed: int, *channels: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, *channels))
    return Image.fromarray(pixels.astype(np.uint8)).resize((width, height))


def pixels_of(image: Image.Image) -> Pixels:
    return Pixels(width=image.width, height=image.height, rgb=image.tobytes())


IMAGE, MASK = generated(1, 3), generated(2)
REQUEST = ImageRequest(
    prompt="A red apple",
    negative_prompt="blurry",
    width=WIDTH,
    height=HEIGHT,
    num_steps=4,
    seed=11,
    sources=(pixels_of(IMAGE),),
    strength=0.6,
)
MASKED = replace(REQUEST, mask=MASK.tobytes())


@cache
def parts_of(name: str, index: int = 0) -> dict[str, Any]:
    return {**components(name), "scheduler": SCHEDULERS[name][index]}


def generate(recipe: Recipe, request: ImageRequest, cache: CacheMethod | None = None) -> Tensor:
    """Finished latents, as the model has them."""
    pools = TensorPools()
    row = recipe.prepare(request, pools, cache=cache)
    denoiser = Denoiser(open_model(recipe.model))
    while not row.is_done:
        denoiser.step([row])
    sample = row.sample.sample
    row.release()
    assert pools.num_used == 0
    return sample


def theirs(
    name: str,
    kind: str,
    parts: dict[str, Any],
    request: ImageRequest,
    output: str = "latent",
    **arguments: Any,
) -> Tensor:
    """Latents, or another output, of diffusers' pipeline `kind` over the parts of `name`."""
    modules = {part: value for part, value in parts.items() if part != "scheduler"}
    scale = open_recipe(name, parts).spec.default_guidance
    arguments["true_cfg_scale" if name.startswith("Qwen") else "guidance_scale"] = scale
    if not name.startswith(("Flux", "SanaSprint")):
        arguments["negative_prompt"] = request.negative_prompt
    result = their_pipeline(kind, modules, parts["scheduler"])(
        prompt=request.prompt,
        num_inference_steps=request.num_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type=output,
        **arguments,
    )
    latents: Tensor = result.frames if name == "WanPipeline" else result.images
    return latents[0]


def distance(ours: Tensor, expected: Tensor) -> float:
    return float((ours.view(expected.shape) - expected).abs().max() / expected.abs().max())


CASES = [
    nightly(name, index) if index else (name, index)
    for name in IMG2IMG
    for index, scheduler in enumerate(SCHEDULERS[name])
    if not ("use_flow_sigmas" in scheduler and name != "WanPipeline")
]
SIZE = {"width": WIDTH, "height": HEIGHT}
GENERATING = [
    name for name in SCHEDULERS if not (spec_of(name).needs_reference or spec_of(name).needs_mask)
]


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What their pipelines would enlarge, or lack."""
    sizes = [(WIDTH, HEIGHT), (HEIGHT, WIDTH)]
    for module in (pipeline_flux_kontext, pipeline_flux_kontext_inpaint, packed):
        monkeypatch.setattr(module, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    monkeypatch.setattr(pipeline_wan_video2video, "basic_clean", str.strip)
    resized = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage21, qwen)
    for module in (*resized, pipeline_qwenimage_layered, pipeline_longcat_image_edit, longcat):
        calculate = partial(_smaller, module.calculate_dimensions)
        monkeypatch.setattr(module, "calculate_dimensions", calculate)
    monkeypatch.setattr(longcat, "resize", _resized)


def _smaller(calculate: Callable[[int, float], Any], num_pixels: int, aspect: float) -> Any:
    return calculate(num_pixels // 256, aspect)


def _resized(image_3HW: Tensor, height: int, width: int) -> Tensor:
    """Resized as in their pipeline: to bytes, by another filter than ours."""
    if image_3HW.is_meta:  # its size is asked for
        return image_3HW.new_empty(3, height, width)
    pixels = (image_3HW * 255).round().byte().permute(1, 2, 0).numpy()
    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
    return image_tensor(pixels_of(resized))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_an_image_changes_as_with_diffusers(name: str, index: int) -> None:
    parts = parts_of(name, index)
    takes_size = name not in {"StableDiffusionPipeline", "StableDiffusionXLPipeline"}
    arguments: dict[str, Any] = dict(SIZE) if takes_size else {}
    arguments |= {"video": [IMAGE]} if name == "WanPipeline" else {"image": IMAGE}
    if name == "SanaSprintPipeline":
        arguments |= {"intermediate_timesteps": None, "use_resolution_binning": False}
        arguments["clean_caption"] = False
    expected = theirs(name, IMG2IMG[name], parts, REQUEST, strength=0.6, **arguments)
    assert distance(generate(open_recipe(name, parts), REQUEST), expected) < 1e-5


@pytest.mark.parametrize("strength", first([0.6, 1.0]))
@pytest.mark.parametrize("name", INPAINT)
def test_an_image_changes_within_a_mask_as_with_diffusers(name: str, strength: float) -> None:
    parts = parts_of(name)
    recipe, request = open_recipe(name, parts), replace(MASKED, strength=strength)
    if name == "Flux2KleinPipeline":  # theirs takes no second prompt
        request = replace(request, negative_prompt="")
    arguments = {"image": IMAGE, "mask_image": MASK, "strength": strength, **SIZE}
    if name == "FluxKontextPipeline":
        arguments |= {"image_reference": IMAGE, "max_area": WIDTH * HEIGHT}
    if name == "ChromaPipeline":  # their pipeline asks for what the model no longer says
        parts["transformer"].register_to_config(guidance_embeds=False)
        arguments["max_sequence_length"] = 512
    expected = theirs(name, INPAINT[name], parts, request, **arguments)
    ours = generate(recipe, request)
    if name == "Flux2KleinPipeline":
        ours = recipe.to_latents(ours, request)
    assert distance(ours, expected) < 1e-5


def check_tokens(recipe: Any, request: ImageRequest) -> None:
    """The tokens of a run are those by which its cost is estimated, whatever the images' sizes."""
    counted = [len(each.tokens_TC) for each in recipe.references(request)]
    assert sum(counted) == recipe.num_reference_tokens(request)
    pixels = recipe.num_frames(request) * request.width * request.height
    num_tokens = GenerationCosts(recipe, 0).of_image(request).num_tokens
    assert num_tokens == sum(counted) + pixels // recipe.token_side**2


@pytest.mark.parametrize("num_images", first([2, 1]))
@pytest.mark.parametrize("name", REFERRING)
def test_reference_images_are_encoded_as_with_diffusers(name: str, num_images: int) -> None:
    parts = parts_of(name)
    recipe = open_recipe(name, parts)
    is_qwen, is_longcat = name.startswith("Qwen"), name.startswith("LongCat")
    if is_qwen or is_longcat:  # squares are not resized
        images = [generated(seed, 3, width=64, height=64) for seed in (4, 5)][:num_images]
    else:  # the second's edges are cut
        images = [IMAGE, generated(3, 3, width=104, height=72)][:num_images]
    sources = tuple(pixels_of(image) for image in images)
    second = REQUEST.negative_prompt if is_qwen or is_longcat else ""
    request = replace(REQUEST, negative_prompt=second, sources=sources, strength=None)
    if num_images > recipe.spec.max_references:
        with pytest.raises(InvalidRequest, match="this model takes at most 1"):
            recipe.prepare(request, TensorPools())
        return
    arguments = dict(SIZE)
    if is_longcat:  # theirs generates at the image's size
        request, arguments = replace(request, height=WIDTH), {}
    if name == "FluxKontextPipeline":
        arguments["max_area"] = WIDTH * HEIGHT
    check_tokens(recipe, request)
    image = images if recipe.spec.max_references > 1 else images[0]
    expected = theirs(name, name, parts, request, image=image, **arguments)
    ours = generate(recipe, request)
    if name == "Flux2KleinPipeline":
        ours = recipe.to_latents(ours, request)
    assert distance(ours, expected) < 1e-5


def test_an_image_is_taken_apart_as_with_diffusers() -> None:
    name = "QwenImageLayeredPipeline"
    parts = parts_of(name)
    recipe, image = open_recipe(name, parts), generated(4, 3, width=32, height=32)
    request = replace(
        REQUEST, sources=(pixels_of(image),), strength=None, width=32, height=32, num_layers=2
    )
    sample = generate(recipe, request)
    whole, *layers = recipe.decode(sample, request)
    opaque = image.convert("RGBA")
    expected = theirs(name, name, parts, request, output="pt", image=opaque, layers=2)
    assert distance(torch.stack(layers), expected) < 3e-5
    over = [Image.fromarray((one.movedim(0, -1) * 255).byte().numpy()) for one in layers]
    pasted = np.asarray(Image.alpha_composite(*over)).astype(int)
    assert np.abs((whole.movedim(0, -1) * 255).byte().numpy() - pasted).max() <= 2
    for change, param in (({"prompt": ""}, "prompt"), ({"strength": 0.5}, "strength")):
        with pytest.raises(InvalidRequest) as refused:
            recipe.check(replace(request, **change))
        assert refused.value.param == param


def test_a_mask_of_everything_is_none_and_one_of_nothing_keeps_the_image() -> None:
    parts = parts_of("FluxPipeline")
    recipe = open_recipe("FluxPipeline", parts)
    everything, nothing = b"\xff" * (HEIGHT * WIDTH), bytes(HEIGHT * WIDTH)
    changed = generate(recipe, REQUEST)
    assert torch.allclose(generate(recipe, replace(REQUEST, mask=everything)), changed, atol=1e-6)
    kept = recipe.decode(generate(recipe, replace(REQUEST, mask=nothing)), REQUEST)
    generated_latents = torch.Generator().manual_seed(REQUEST.seed)
    latents = encode_image(recipe.vae, image_tensor(REQUEST.sources[0]), generated_latents)
    assert torch.allclose(kept, decode_latents(recipe.vae, latents[None])[0], atol=1e-6)


@pytest.mark.parametrize("name", GENERATING)
def test_at_full_strength_an_image_is_generated_from_words(name: str) -> None:
    recipe = open_recipe(name, parts_of(name))
    request = replace(REQUEST, strength=1.0, num_steps=2)
    if name.startswith("Sana"):  # its tiny autoencoder halves once
        request = replace(request, width=32, height=64)
    plain = generate(recipe, replace(request, sources=(), strength=None))
    if recipe.spec.max_references:
        assert not torch.allclose(generate(recipe, request), plain)
    else:
        assert torch.equal(generate(recipe, request), plain)
    near = generate(recipe, replace(request, strength=0.5))
    assert not torch.allclose(near, plain)


@pytest.mark.parametrize("name", ["FluxPipeline", "Flux2KleinPipeline"])
def test_batch_mates_change_nothing(name: str) -> None:
    recipe, pools = open_recipe(name, parts_of(name)), TensorPools()
    requests = [
        REQUEST,
        MASKED,
        replace(MASKED, strength=None, seed=5),
        replace(REQUEST, sources=(), strength=None),
        replace(REQUEST, strength=None, sampler="heun", num_steps=3),
    ]
    alone = [generate(recipe, request) for request in requests]
    rows = [recipe.prepare(request, pools) for request in requests]
    denoiser = Denoiser(open_model(recipe.model))
    while running := [row for row in rows if not row.is_done]:
        denoiser.step(running)
    for row, expected in zip(rows, alone, strict=True):
        assert distance(row.sample.sample, expected) < 1e-5
        row.release()
    assert pools.num_used == 0


@pytest.mark.parametrize(
    "name", ["FluxKontextPipeline", "Flux2Pipeline", "QwenImageEditPlusPipeline"]
)
def test_caches_between_blocks_see_the_images_too(name: str) -> None:
    recipe = open_recipe(name, parts_of(name))
    request = replace(REQUEST, strength=None, num_steps=6)
    exact = generate(recipe, request)
    assert distance(generate(recipe, request, first_block(threshold=0.0)), exact) < 1e-5
    plan = planned([True, True, False, True, False, True], level=Level.SPAN)
    assert 1e-6 < distance(generate(recipe, request, plan), exact) < 0.3


def test_an_image_without_a_prompt_is_varied_without_a_second_branch() -> None:
    recipe = open_recipe("StableDiffusionPipeline", parts_of("StableDiffusionPipeline"))
    asked = replace(REQUEST, prompt="", negative_prompt="", strength=None)
    assert len(recipe.prompts(asked)) == 1
    assert len(recipe.prompts(replace(asked, negative_prompt="blurry"))) == 2
    assert len(recipe.prompts(replace(asked, sources=()))) == 2
    pools = TensorPools()
    row = recipe.prepare(asked, pools)
    assert row.sample.step == recipe.spec.first_step(4, 0.8) == 1
    row.release()


def test_images_of_another_size_are_fitted() -> None:
    recipe = open_recipe("StableDiffusionPipeline", parts_of("StableDiffusionPipeline"))
    small, large = (
        Pixels(width=width, height=height, rgb=b"\x40" * (3 * width * height))
        for width, height in ((30, 20), (WIDTH, HEIGHT))
    )
    alike = replace(REQUEST, sources=(large,))
    assert torch.allclose(
        generate(recipe, replace(REQUEST, sources=(small,))), generate(recipe, alike), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strength": 0.0}, "must be between 0 and 1"),
        ({"strength": 1.2}, "must be between 0 and 1"),
        ({"strength": float("nan")}, "must be between 0 and 1"),
        ({"sources": ()}, "strength needs an image"),
        ({"sources": (), "strength": None, "mask": MASKED.mask}, "mask needs an image"),
        ({"sources": REQUEST.sources * 2}, "2 images are too many: this model takes at most 1"),
        ({"sampler": "lcm"}, "lcm does not suit this model; its samplers are: euler"),
    ],
)
def test_what_cannot_be_generated_is_named(changes: dict[str, Any], message: str) -> None:
    recipe, pools = open_recipe("FluxPipeline", parts_of("FluxPipeline")), TensorPools()
    with pytest.raises(InvalidRequest, match=message):
        recipe.prepare(replace(REQUEST, **changes), pools)
    assert pools.num_used == 0
