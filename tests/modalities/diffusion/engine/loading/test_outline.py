"""What generation takes is the same by a model's shapes alone as by its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.diffusers_pipelines import SCHEDULERS, components
from support.tiny_text_encoders import tokenizer
from triptych.core.engine_api.pixels import Pixels
from triptych.core.options.config import Config
from triptych.modalities.diffusion.engine.costs import GenerationCosts, own_request
from triptych.modalities.diffusion.engine.loading.modules import is_of_diffusers
from triptych.modalities.diffusion.engine.loading.outline import outline
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.room import Room
from triptych.modalities.diffusion.wire import ImageRequest

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


def _outlined(part: Any) -> Any:
    if not isinstance(part, nn.Module):
        return part
    config: Any = part.config
    fields = dict(config) if is_of_diffusers(type(part)) else json.loads(config.to_json_string())
    weight = next(part.parameters())
    sketched = outline(type(part), fields, weight.dtype)
    assert all(tensor.is_meta for tensor in sketched.parameters())
    return sketched


@torch.inference_mode()
def _sizes(pipeline: str, parts: dict[str, Any]) -> tuple[Any, ...]:
    costs = GenerationCosts.of(open_recipe(pipeline, parts))
    own = costs.of_image(own_request(costs.recipe))
    row, decoding = costs.row_bytes(own.num_tokens), costs.decode_bytes(own.num_pixels)
    return costs.text_bytes, own, row, decoding


@pytest.mark.parametrize("pipeline", sorted(SCHEDULERS))
def test_sizes_need_no_weights(pipeline: str) -> None:
    parts = {**components(pipeline), "scheduler": SCHEDULERS[pipeline][0]}
    for dtype in (torch.float32, torch.bfloat16):
        for part in parts.values():
            if isinstance(part, nn.Module):
                part.to(dtype)
        outlined = {name: _outlined(part) for name, part in parts.items()}
        assert _sizes(pipeline, outlined) == _sizes(pipeline, parts)


@pytest.mark.parametrize(
    ("pipeline", "num_images"),
    [("ErnieImagePipeline", 0), ("QwenImage21Pipeline", 3), ("QwenImageEditPlusPipeline", 3)],
)
@torch.inference_mode()
def test_no_prompt_takes_more_than_its_estimate(pipeline: str, num_images: int) -> None:
    parts = {**components(pipeline), "scheduler": SCHEDULERS[pipeline][0]}
    if not num_images:
        parts["tokenizer"] = tokenizer(10**30)
    recipe = open_recipe(pipeline, {name: _outlined(part) for name, part in parts.items()})
    costs = GenerationCosts.of(recipe)
    image = Pixels(width=64, height=64, rgb=bytes(3 * 64 * 64))
    request = ImageRequest(
        prompt=32_000 * "a", width=64, height=64, guidance_scale=1.0, sources=num_images * (image,)
    )
    (text,) = recipe.encode_all(recipe.prompts(request))
    text_bytes = sum(tensor.nbytes for tensor in text.values())
    without = replace(costs, text_bytes=0, seen_bytes=0).of_image(request)
    assert text_bytes <= costs.of_image(request).state_bytes - without.state_bytes


def test_encoding_a_prompt_has_room() -> None:
    """A longest prompt with every image, and the scores that T5 keeps."""
    costs_of = {}
    for pipeline in ("FluxPipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"):
        parts = {**components(pipeline), "scheduler": SCHEDULERS[pipeline][0]}
        recipe = open_recipe(pipeline, {name: _outlined(part) for name, part in parts.items()})
        costs_of[pipeline] = GenerationCosts.of(recipe)
    flux, edit, plus = costs_of.values()
    assert flux.encode_bytes > 3 * 2 * 512**2 * 4  # of two heads
    assert plus.encode_bytes > edit.encode_bytes > 0
    reserved: dict[str, int] = {}
    memory: Any = SimpleNamespace(
        available_bytes=2**40,
        most_bytes=2**40,
        reserve=lambda purpose, num_bytes, remedy: reserved.update({purpose: num_bytes}),
    )
    Room.reserve(memory, replace(plus, encode_bytes=2**39), Config(), captures=False)
    assert reserved["activations"] == 2**39
