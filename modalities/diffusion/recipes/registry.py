"""Which recipe a model_index.json asks for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triptych.core.errors import WeightsError
from triptych.modalities.diffusion.recipes import pipelines
from triptych.modalities.diffusion.recipes.recipe import Recipe

_RECIPES: MappingProxyType[str, type[Recipe]] = MappingProxyType(
    {
        "AuraFlowPipeline": pipelines.AuraFlow,
        "ChromaPipeline": pipelines.Chroma,
        "FluxPipeline": pipelines.Flux,
        "Lumina2Pipeline": pipelines.Lumina2,
        "PixArtAlphaPipeline": pipelines.PixArtAlpha,
        "PixArtSigmaPipeline": pipelines.PixArt,
        "QwenImagePipeline": pipelines.QwenImage,
        "SanaPipeline": pipelines.Sana,
        "StableDiffusion3Pipeline": pipelines.StableDiffusion3,
        "StableDiffusionPipeline": pipelines.StableDiffusion,
        "StableDiffusionXLPipeline": pipelines.StableDiffusionXL,
        "ZImagePipeline": pipelines.ZImage,
    }
)


def open_recipe(pipeline: str, components: Mapping[str, Any]) -> Recipe:
    """The recipe of a pipeline's class name. Raises `WeightsError` if it is not known."""
    if pipeline not in _RECIPES:
        known = ", ".join(sorted(_RECIPES))
        raise WeightsError(f"{pipeline} is no pipeline known here; these are: {known}.")
    return _RECIPES[pipeline](components)
