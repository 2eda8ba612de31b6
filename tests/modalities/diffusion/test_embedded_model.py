"""The embedded image model, as it ships: it opens, and generates what it is asked for."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

from triptych.core.options.config import ModelOptions
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.loading.components import open_components
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.source import FOLDER
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
MAX_PARAMETERS = 24_000_000
MAX_BYTES = 48_000_000
LEAST_APART, MEAN_APART = 0.04, 0.15  # of 1, mean over all values
_SIDE = 128


@cache
def recipe() -> Recipe:
    parts = open_components(
        FOLDER,
        ModelOptions(),
        device=torch.device("cpu"),
        dtype=lambda stored: torch.float32,
        report=lambda share: None,
    )
    return open_recipe(parts.pipeline, parts.parts)


@cache
@torch.inference_mode()
def generated(*asked: tuple[str, int]) -> list[tuple[Tensor, Tensor]]:
    """Latents `[8, 16, 16]` and image `[3, 128, 128]` of each prompt and seed, in one batch."""
    requests = [
        ImageRequest(prompt=prompt, width=_SIDE, height=_SIDE, num_steps=12, seed=seed)
        for prompt, seed in asked
    ]
    pools = TensorPools()
    rows = [recipe().prepare(request, pools) for request in requests]
    denoiser = Denoiser(open_model(recipe().model))
    while not rows[0].is_done:
        denoiser.step(rows)
    found = []
    for request, row in zip(requests, rows, strict=True):
        latents = recipe().to_latents(row.sample.sample, request).clone()
        found.append((latents, recipe().decode(row.sample.sample, request)))
    return found


PROMPTS = (
    "a red apple on a blue background",
    "a red apple on a yellow background",
    "a banana on a blue background",
)


def images() -> list[Tensor]:
    """An image of each prompt."""
    return [image for _, image in generated(*((prompt, 3) for prompt in PROMPTS))]


def ground(image: Tensor) -> Tensor:
    """The colour of the ground `[3]`: the median of the image's border."""
    border = (image[:, :4], image[:, -4:], image[:, :, :4], image[:, :, -4:])
    return torch.cat([side.flatten(1) for side in border], 1).median(1).values


def thing(image: Tensor) -> Tensor:
    """The mean colour `[3]` of what is not ground."""
    is_thing = (image - ground(image)[:, None, None]).abs().amax(0) > 0.3
    return image[:, is_thing].mean(1)


def test_it_is_as_small_as_promised() -> None:
    files = list(FOLDER.rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    num_parameters = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert num_parameters <= MAX_PARAMETERS


def test_the_ground_has_the_colour_asked_for() -> None:
    on_blue, on_yellow, _ = images()
    red, green, blue = ground(on_blue).tolist()
    assert blue > max(red, green) + 0.2
    red, green, blue = ground(on_yellow).tolist()
    assert min(red, green) > blue + 0.2


def test_a_thing_has_its_own_colour() -> None:
    apple, _, banana = images()
    red, green, blue = thing(apple).tolist()
    assert red > max(green, blue) + 0.2
    red, green, blue = thing(banana).tolist()
    assert min(red, green) > blue + 0.2


def test_seeds_of_a_prompt_are_different_images() -> None:
    """As far apart as other grounds, places, sizes and sets make them."""
    shown = torch.stack([image for _, image in generated(*(("an apple", n) for n in range(8)))])
    apart = torch.cdist(shown.flatten(1), shown.flatten(1), p=1)[*torch.triu_indices(8, 8, 1)]
    apart /= shown[0].numel()
    assert apart.min() > LEAST_APART
    assert apart.mean() > MEAN_APART


def test_the_map_for_previews_shows_the_image() -> None:
    ((latents, image), *_) = generated(*((prompt, 3) for prompt in PROMPTS))
    preview = load_file(FOLDER / "preview.safetensors")
    shown = torch.einsum("rc,chw->rhw", preview["weight"], latents) + preview["bias"][:, None, None]
    small = avg_pool2d(image, 8)
    together = torch.corrcoef(torch.stack((shown.flatten(), small.flatten())))[0, 1]
    assert together > 0.8
    assert (shown - small).mean().abs() < 0.1


def test_the_index_names_what_diffusers_opens() -> None:
    index = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "FluxPipeline"
    vae = json.loads((FOLDER / "vae" / "config.json").read_text(encoding="utf-8"))
    assert vae["scaling_factor"] != 1.0
    assert len(vae["block_out_channels"]) == len(vae["decoder_block_out_channels"])
