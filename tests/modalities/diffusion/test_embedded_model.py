"""The embedded image model, as it ships: it opens, and draws what it is asked for."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d

from triptych.core.config import ModelOptions
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.loading.components import open_components
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools
from triptych.modalities.diffusion.source import FOLDER
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
MAX_PARAMETERS = 18_000_000
MAX_BYTES = 36_000_000
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
def drawn(*prompts: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Latents `[8, 16, 16]` and picture `[3, 128, 128]` of each prompt, in one batch."""
    requests = [
        ImageRequest(prompt=prompt, width=_SIDE, height=_SIDE, num_steps=12, seed=3)
        for prompt in prompts
    ]
    pools = TensorPools()
    rows = [recipe().prepare(request, pools) for request in requests]
    denoiser = Denoiser(open_model(recipe().model))
    while not rows[0].is_done:
        denoiser.step(rows)
    found = {}
    for request, row in zip(requests, rows, strict=True):
        sample = row.sample.sample
        found[request.prompt] = (
            recipe().to_latents(sample, request).clone(),
            recipe().decode(sample, request),
        )
    return found


PROMPTS = (
    "a red apple on a blue background",
    "a red apple on a yellow background",
    "a banana on a blue background",
)


def corners(picture: Tensor) -> Tensor:
    """The mean colour of the four corners, `[3]`."""
    return torch.stack(
        [picture[:, y : y + 8, x : x + 8].mean((1, 2)) for y in (0, -9) for x in (0, -9)]
    ).mean(0)


def test_it_is_as_small_as_promised() -> None:
    files = list(FOLDER.rglob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES
    num_parameters = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert num_parameters <= MAX_PARAMETERS


def test_the_background_has_the_colour_asked_for() -> None:
    pictures = drawn(*PROMPTS)
    red, green, blue = corners(pictures[PROMPTS[0]][1]).tolist()
    assert blue > max(red, green) + 0.2
    red, green, blue = corners(pictures[PROMPTS[1]][1]).tolist()
    assert min(red, green) > blue + 0.2


def test_the_object_has_its_own_colour() -> None:
    pictures = drawn(*PROMPTS)
    apple = pictures[PROMPTS[0]][1][:, 48:80, 48:80].mean((1, 2))
    banana = pictures[PROMPTS[2]][1][:, 40:88, 40:88].mean((1, 2))
    assert apple[0] > max(apple[1], apple[2]) + 0.2
    assert banana[0] - apple[0] < banana[1] - apple[1]  # yellow is red and green
    assert (pictures[PROMPTS[0]][1] - pictures[PROMPTS[2]][1]).abs().mean() > 0.05


def test_the_map_for_previews_shows_the_picture() -> None:
    latents, picture = drawn(*PROMPTS)[PROMPTS[0]]
    preview = load_file(FOLDER / "preview.safetensors")
    shown = torch.einsum("rc,chw->rhw", preview["weight"], latents) + preview["bias"][:, None, None]
    small = avg_pool2d(picture, 8)
    together = torch.corrcoef(torch.stack((shown.flatten(), small.flatten())))[0, 1]
    assert together > 0.8
    assert (shown - small).mean().abs() < 0.1


def test_the_index_names_what_diffusers_opens() -> None:
    index = json.loads((FOLDER / "model_index.json").read_text(encoding="utf-8"))
    assert index["_class_name"] == "FluxPipeline"
    vae = json.loads((FOLDER / "vae" / "config.json").read_text(encoding="utf-8"))
    assert vae["scaling_factor"] != 1.0
    assert len(vae["block_out_channels"]) == len(vae["decoder_block_out_channels"])
