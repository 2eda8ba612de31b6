"""The families of models that see: what tells one from another.

Owns the table from `model_type` to facts: how a picture is processed and spelled in a prompt, what
its encoder is called with, and how its positions are attended to. Torch is not needed; `config` is
always transformers' own configuration object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from triptych.modalities.vlm.processing.spelling import (
    Found,
    is_pixtral,
    pixtral_patch,
    spell_any,
    spell_gemma3,
    spell_idefics3,
    spell_internvl,
    spell_llava,
    spell_llava_next,
    spell_onevision,
    spell_paligemma,
    spell_pixtral,
    spell_qwen,
    spell_slots,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How a kind of model takes pictures.

    `placeholder` is what a chat template puts where one goes, `spell` gives what takes its place.
    `options` are added to the image processor's own settings; of what it makes, the encoder takes
    `inputs`, all where none are named. Where a family `has_scaling` it is told to leave values as
    bytes, since it is known how to go on from there. It `nests_images` by prompt, or cuts a picture
    into tiles and so `has_tiles` in a further axis. The inputs of several pictures are joined along
    `batch_axis`, where they can be.

    Positions of a picture see each other with `whole_spans`, those of a prompt with
    `whole_prompts`; all others see what came before them.
    """

    placeholder: str
    spell: Callable[[Any, Any, Found], str]
    options: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    inputs: tuple[str, ...] = ("pixel_values",)
    has_scaling: bool = True
    nests_images: bool = False
    has_tiles: bool = False
    batch_axis: int | None = 0
    whole_spans: bool = False
    whole_prompts: bool = False


def family_of(config: Any) -> VisionFamily:
    """The family of a configuration; `ANY` for those of none."""
    return FAMILIES.get(config.model_type, ANY)


def _pixtral_options(config: Any) -> Mapping[str, Any]:
    return {"patch_size": pixtral_patch(config)} if is_pixtral(config) else {}


def _llava_next(spell: Callable[[Any, Any, Found], str]) -> VisionFamily:
    inputs = ("pixel_values", "image_sizes")
    return VisionFamily(placeholder="<image>", spell=spell, inputs=inputs, has_tiles=True)


_IDEFICS3 = VisionFamily(
    placeholder="<image>",
    spell=spell_idefics3,
    options=lambda config: {"return_row_col_info": True},
    inputs=("pixel_values", "pixel_attention_mask"),
    nests_images=True,
    batch_axis=1,
)
_QWEN = VisionFamily(
    placeholder="<|image_pad|>", spell=spell_qwen, inputs=("pixel_values", "image_grid_thw")
)

ANY = VisionFamily(placeholder="", spell=spell_any, inputs=(), has_scaling=False, batch_axis=None)
"""Of models that no other is about: their own processor does all there is to do."""

FAMILIES: Mapping[str, VisionFamily] = MappingProxyType(
    {
        "llava": VisionFamily(
            placeholder="<image>",
            spell=spell_llava,
            options=_pixtral_options,
            inputs=("pixel_values", "image_sizes"),
        ),
        "llava_next": _llava_next(spell_llava_next),
        "llava_onevision": _llava_next(spell_onevision),
        "idefics3": _IDEFICS3,
        "smolvlm": _IDEFICS3,
        "internvl": VisionFamily(
            placeholder="<IMG_CONTEXT>",
            spell=spell_internvl,
            options=lambda config: {"crop_to_patches": True},
        ),
        "mistral3": VisionFamily(
            placeholder="[IMG]",
            spell=spell_pixtral,
            options=_pixtral_options,
            inputs=("pixel_values", "image_sizes"),
        ),
        "gemma3": VisionFamily(
            placeholder="<start_of_image>", spell=spell_gemma3, whole_spans=True
        ),
        "paligemma": VisionFamily(placeholder="<image>", spell=spell_paligemma, whole_prompts=True),
        "qwen2_vl": _QWEN,
        "qwen2_5_vl": _QWEN,
        "qwen3_vl": _QWEN,
        "triptych_slots": VisionFamily(placeholder="<image>", spell=spell_slots),
    }
)
