"""The families of vision models, and how each spells an image in a prompt.

Owns the table from `model_type` to facts: how an image is processed and spelled (the model's
separators, and a mark for each feature), its encoder's inputs, and its attention mask. A spelling
function receives the model's configuration, its image processor, and that processor's output for
one image; the longer ones call transformers' own processors. Needs no torch; `config` is always
transformers' own configuration object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import transformers

MARK = "\uf8ff"
"""Marks a feature: a character of the private use area, in no model's text."""

Processed = Mapping[str, Any]


def spell_llava(config: Any, images: Any, processed: Processed) -> str:
    """One feature per patch. A Pixtral tower, as in some LLaVAs, is spelled like Pixtral."""
    if is_pixtral(config):
        return spell_pixtral(config, images, processed)
    return _ask("LlavaProcessor", images, processed, _llava_fields(config))


def spell_llava_next(config: Any, images: Any, processed: Processed) -> str:
    """The whole image, then its tiles row by row, with the padding cut off."""
    return _ask("LlavaNextProcessor", images, processed, _llava_fields(config))


def spell_onevision(config: Any, images: Any, processed: Processed) -> str:
    """As LLaVA-NeXT, with large numbers of tiles reduced."""
    fields = {
        "num_image_tokens": grid_size(config.vision_config) ** 2,
        "vision_aspect_ratio": config.vision_aspect_ratio,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    return _ask("LlavaOnevisionProcessor", images, processed, fields)


def spell_idefics3(config: Any, images: Any, processed: Processed) -> str:
    """Tiles, each after its row and column, then the whole image."""
    tag = "<global-img>"
    fields = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": tag,
        "global_image_token": tag,
        "image_seq_len": grid_size(config.vision_config) ** 2 // config.scale_factor**2,
    }
    kind = "SmolVLMProcessor" if config.model_type == "smolvlm" else "Idefics3Processor"
    return _ask(kind, images, processed, fields)


def spell_internvl(config: Any, images: Any, processed: Processed) -> str:
    """All tiles in one run."""
    num_patches = grid_size(config.vision_config) ** 2
    num_features = int(num_patches * config.downsample_ratio**2)
    return f"<img>{MARK * num_features * int(processed['num_patches'][0])}</img>"


def spell_pixtral(config: Any, images: Any, processed: Processed) -> str:
    """Row by row, each ended by a special token."""
    height, width = (int(size) // pixtral_patch(config) for size in processed["image_sizes"][0])
    row = MARK * width
    return "[IMG_BREAK]".join([row] * height) + "[IMG_END]"


def spell_qwen(config: Any, images: Any, processed: Processed) -> str:
    """A square of patches is a feature; the chat template writes the tokens around it."""
    return MARK * int(processed["image_grid_thw"][0].prod() // images.merge_size**2)


def spell_gemma3(config: Any, images: Any, processed: Processed) -> str:
    """A fixed number of features between two tokens and empty lines."""
    return f"\n\n<start_of_image>{MARK * config.mm_tokens_per_image}<end_of_image>\n\n"


def spell_paligemma(config: Any, images: Any, processed: Processed) -> str:
    """One feature per patch; the prompt's first token follows the images."""
    return MARK * grid_size(config.vision_config) ** 2


def spell_slots(config: Any, images: Any, processed: Processed) -> str:
    """A fixed number of soft tokens, and a new line."""
    return MARK * int(config.vision_config.num_positions) + "\n"


def spell_none(config: Any, images: Any, processed: Processed) -> str:
    """Refuse: the whole processor of a model spells its images; see `mark_images`."""
    raise AssertionError("models of unknown families have a processor of their own")


def mark_images(config: Any, processor: Any, spelled: str) -> str:
    """The spelling of an image by transformers' own `processor`, with a mark for each feature."""
    return spelled.replace(processor.tokenizer.decode([config.image_token_id]), MARK)


def is_pixtral(config: Any) -> bool:
    """Whether the tower takes images of any size."""
    return bool(config.vision_config.model_type == "pixtral")


def pixtral_patch(config: Any) -> int:
    """Pixels along one side of a feature's square."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def grid_size(vision: Any) -> int:
    """Patches along one side of the tower's image size."""
    sizes = (vision.image_size, vision.patch_size)
    image, patch = (size if isinstance(size, int) else size[0] for size in sizes)
    return int(image // patch)


def _llava_fields(config: Any) -> dict[str, Any]:
    """The processor's fields. CLIP towers have a class feature, which most models drop."""
    return {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": int(config.vision_config.model_type == "clip_vision_model"),
    }


def _ask(name: str, images: Any, processed: Processed, fields: Mapping[str, Any]) -> str:
    """Spell an image with a transformers processor class."""
    # Its constructor requires a tokenizer, which spelling does not use: fields are enough.
    processor = object.__new__(getattr(transformers, name))
    processor.__dict__.update(fields, image_processor=images, image_token=MARK)
    return str(processor.replace_image_token(processed, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How a family of models handles images.

    `placeholder` is the chat template's mark for an image, `spell` returns its replacement.
    `options` are added to the image processor's own settings. The encoder takes `inputs` from the
    processor's output, all if none are named. If a family `has_scaling`, its processor leaves
    values as bytes, and the encoder scales them. A processor that `nests_images` groups them by
    prompt; one that `has_tiles` adds an axis of tiles. The inputs of several images are joined
    along `batch_axis`, if possible.

    With `whole_spans`, attention is bidirectional within an image, with `whole_prompts` within a
    prompt; elsewhere it is causal.
    """

    placeholder: str
    spell: Callable[[Any, Any, Processed], str]
    options: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    inputs: tuple[str, ...] = ("pixel_values",)
    has_scaling: bool = True
    nests_images: bool = False
    has_tiles: bool = False
    batch_axis: int | None = 0
    whole_spans: bool = False
    whole_prompts: bool = False


def family_of(config: Any) -> VisionFamily:
    """The family of a configuration; `ANY` for an unknown one."""
    return FAMILIES.get(config.model_type, ANY)


def _pixtral_options(config: Any) -> Mapping[str, Any]:
    return {"patch_size": pixtral_patch(config)} if is_pixtral(config) else {}


def _llava_next(spell: Callable[[Any, Any, Processed], str]) -> VisionFamily:
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

_GLM = replace(_QWEN, placeholder="<|image|>")

ANY = VisionFamily(placeholder="", spell=spell_none, inputs=(), has_scaling=False, batch_axis=None)
"""The family of all other models: their own processor does everything."""

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
        "glm_ocr": _GLM,
        "qwen2_vl": _QWEN,
        "qwen2_5_vl": _QWEN,
        "qwen3_vl": _QWEN,
        "qwen3_5": _QWEN,
        "qwen3_5_moe": _QWEN,
        "triptych_slots": VisionFamily(placeholder="<image>", spell=spell_slots),
    }
)
