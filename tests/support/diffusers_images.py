"""Images of diffusers' own pipelines, for the requests that ours get."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from support.diffusers_pipelines import their_pipeline
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.wire import ImageRequest


def extras_of(name: str, request: ImageRequest, recipe: Recipe) -> dict[str, Any]:
    """Arguments of their call beside prompt, size and steps."""
    scale = recipe.spec.default_guidance
    arguments: dict[str, Any] = {
        "negative_prompt": request.negative_prompt,
        "guidance_scale": scale,
    }
    if name.startswith(("Flux", "Glm")):
        del arguments["negative_prompt"]
    if name == "FluxKontextPipeline":
        arguments["max_area"] = request.width * request.height
    if name == "WanPipeline":
        arguments["num_frames"] = 1
    if name == "SanaSprintPipeline":
        del arguments["negative_prompt"]
        arguments["intermediate_timesteps"] = None
    if name == "HunyuanImagePipeline":
        arguments = {"negative_prompt": request.negative_prompt}
        if recipe.model.config.guidance_embeds:
            arguments["distilled_guidance_scale"] = scale
    if name == "LongCatImagePipeline":
        arguments["enable_prompt_rewrite"] = False
    if name in ("QwenImage21Pipeline", "QwenImagePipeline"):
        arguments = {"negative_prompt": request.negative_prompt, "true_cfg_scale": scale}
    if name.startswith(("PixArt", "Sana")):
        arguments["use_resolution_binning"] = False
        arguments["clean_caption"] = False
    return arguments


def request_for(name: str, request: ImageRequest) -> ImageRequest:
    """What both generate: Klein's pipeline takes no second prompt, HiDream's chooses the shape."""
    if name == "GlmImagePipeline":  # it reads quoted words apart
        return replace(request, prompt="A sign 'Hi' \"you\"", negative_prompt="")
    if name == "Flux2KleinPipeline":
        return replace(request, negative_prompt="")
    if name == "HiDreamImagePipeline":
        return replace(request, width=64, height=64)
    if name in ("HunyuanImagePipeline", "LongCatImagePipeline"):  # these read quoted words apart
        return replace(request, prompt="A sign that doesn't say \"Hi\" or 'you'")
    # Sana's tiny autoencoder halves once.
    return replace(request, width=32, height=64) if name.startswith("Sana") else request


def theirs(name: str, parts: dict[str, Any], request: ImageRequest, output: str) -> Tensor:
    recipe = open_recipe(name, parts)
    modules = {part: value for part, value in parts.items() if part != "scheduler"}
    pipeline = their_pipeline(name, modules, parts["scheduler"])
    result = pipeline(
        prompt=request.prompt,
        width=request.width,
        height=request.height,
        num_inference_steps=request.num_steps,
        generator=torch.Generator().manual_seed(request.seed),
        output_type=output,
        **extras_of(name, request, recipe),
    )
    images: Tensor = result.frames if name == "WanPipeline" else result.images
    if name == "WanPipeline":  # one frame of a video
        return images[0, :, 0] if output == "latent" else images[0, 0]
    return images[0]
