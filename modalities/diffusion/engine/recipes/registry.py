"""The recipe of each pipeline class."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triptych.modalities.diffusion.engine.loading.components import denoiser_of
from triptych.modalities.diffusion.engine.recipes import (
    ernie,
    flux2,
    glm,
    hunyuan,
    layered,
    longcat,
    packed,
    qwen,
    qwen21,
    spatial,
)
from triptych.modalities.diffusion.engine.recipes.recipe import Recipe
from triptych.modalities.diffusion.spec import served_name, spec_of

_RECIPES: MappingProxyType[str, type[Recipe]] = MappingProxyType(
    {
        "AuraFlowPipeline": spatial.AuraFlow,
        "ChromaPipeline": packed.Chroma,
        "ErnieImagePipeline": ernie.ErnieImage,
        "Flux2KleinPipeline": flux2.Flux2Klein,
        "Flux2Pipeline": flux2.Flux2,
        "FluxFillPipeline": packed.FluxFill,
        "FluxKontextPipeline": packed.FluxKontext,
        "FluxPipeline": packed.Flux,
        "GlmImagePipeline": glm.GlmImage,
        "HiDreamImagePipeline": spatial.HiDream,
        "HunyuanImagePipeline": hunyuan.HunyuanImage,
        "LongCatImageEditPipeline": longcat.LongCatImageEdit,
        "LongCatImagePipeline": longcat.LongCatImage,
        "Lumina2Pipeline": spatial.Lumina2,
        "Lumina2Text2ImgPipeline": spatial.Lumina2,
        "OvisImagePipeline": packed.OvisImage,
        "PixArtAlphaPipeline": spatial.PixArtAlpha,
        "PixArtSigmaPipeline": spatial.PixArt,
        "QwenImage21Pipeline": qwen21.QwenImage21,
        "QwenImageEditPipeline": qwen.QwenImageEdit,
        "QwenImageEditPlusPipeline": qwen.QwenImageEditPlus,
        "QwenImageLayeredPipeline": layered.QwenImageLayered,
        "QwenImagePipeline": qwen.QwenImage,
        "SanaPipeline": spatial.Sana,
        "SanaSprintPipeline": spatial.SanaSprint,
        "StableDiffusion3Pipeline": spatial.StableDiffusion3,
        "StableDiffusionPipeline": spatial.StableDiffusion,
        "StableDiffusionXLPipeline": spatial.StableDiffusionXL,
        "WanPipeline": spatial.Wan,
        "ZImagePipeline": spatial.ZImage,
    }
)


def open_recipe(pipeline: str, components: Mapping[str, Any]) -> Recipe:
    """The recipe of a pipeline class, by its name. Raises `WeightsError` if it is unknown."""
    spec = spec_of(pipeline, denoiser_of(components).config, components)
    return _RECIPES[served_name(pipeline)](components, spec)
