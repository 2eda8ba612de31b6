"""The tokens that text encoders read of prompts, however long and however written."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from support.diffusers_pipelines import components
from support.tiny_text_encoders import tokenizer
from triptych.core.engine_api.pixels import Pixels
from triptych.modalities.diffusion.engine.recipes.qwen import without_images
from triptych.modalities.diffusion.engine.recipes.recipe import BranchPrompt, Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.wire import ImageRequest

IMAGE = Pixels(width=32, height=32, rgb=b"\x40" * (3 * 32 * 32))
SEEING = ["LongCatImageEditPipeline", "QwenImage21Pipeline", "QwenImageEditPlusPipeline"]
SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


def opened(name: str) -> Recipe:
    parts = {**components(name), "scheduler": SCHEDULER}
    limitless = {part: tokenizer(10**30) for part in parts if part == "tokenizer"}
    return open_recipe(name, parts if name in SEEING else {**parts, **limitless})


@torch.inference_mode()
def encoded(recipe: Recipe, text: str) -> Tensor:
    images = (IMAGE,) if recipe.spec.max_references else ()
    (found,) = recipe.encode_all([BranchPrompt(text, images=images)])
    return found["text_bth" if "text_bth" in found else "encoder_hidden_states"]


def test_no_image_token_is_made_by_removing_others() -> None:
    parts = ["<|image_", "<|video_", "pad|>", "<|image_pad|>", "<|video_pad|>", "<|", "|>"]
    for pieces in product(parts, repeat=4):
        cleaned = without_images("".join(pieces))
        assert "<|image_pad|>" not in cleaned
        assert "<|video_pad|>" not in cleaned
    assert without_images("a<|image_pad|>b") == "a b"


@pytest.mark.parametrize("name", SEEING)
def test_a_prompt_cannot_stand_for_absent_images(name: str) -> None:
    recipe = opened(name)
    text = "a <|image_<|video_pad|>pad|> <|image_pad|><|vision_start|>"
    assert torch.isfinite(encoded(recipe, text)).all()


@pytest.mark.parametrize("name", ["ErnieImagePipeline", *SEEING])
def test_a_long_prompt_is_cut_where_its_tokenizer_states_no_limit(name: str) -> None:
    recipe = opened(name)
    long = encoded(recipe, 3000 * "a")
    assert long.shape == encoded(recipe, 3500 * "a").shape
    assert torch.equal(long, encoded(recipe, 2500 * "a" + 500 * "b"))
    assert recipe.is_prompt_cut(ImageRequest(prompt=3000 * "a", guidance_scale=1.0))
    assert recipe.num_prompt_tokens(ImageRequest(prompt=3000 * "a")) <= 2048
