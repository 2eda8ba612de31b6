"""The families of vision models, and how each spells an image in a prompt.

Owns the table from `model_type` to facts: how an image is processed and spelled (separators of the
model's, and a mark for each feature), what its encoder is called with, and how its positions are
attended to. A function that spells takes the model's configuration, its image processor and what
that made of one image; the longer ones ask transformers' own processors. Torch is not needed;
`config` is always transformers' own configuration object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import transformers

MARK = "\uf8ff"
"""Stands for a feature: of the private use area, and in no text of a model's own."""

Found = Mapping[str, Any]


def spell_llava(config: Any, images: Any, found: Found) -> str:
    """A patch is a feature. Pixtral's tower, which some LLaVAs have, is spelled like Pixtral."""
    if is_pixtral(config):
        return spell_pixtral(config, images, found)
    return _ask("LlavaProcessor", images, found, _llava_fields(config))


def spell_llava_next(config: Any, images: Any, found: Found) -> str:
    """The whole image, then its tiles row by row, the filling cut off again."""
    return _ask("LlavaNextProcessor", images, found, _llava_fields(config))


def spell_onevision(config: Any, images: Any, found: Found) -> str:
    """As LLaVA-NeXT, with many tiles shrunk."""
    fields = {
        "num_image_tokens": grid_size(config.vision_config) ** 2,
        "vision_aspect_ratio": config.vision_aspect_ratio,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
    }
    return _ask("LlavaOnevisionProcessor", images, found, fields)


def spell_idefics3(config: Any, images: Any, found: Found) -> str:
    """Tiles, each after its row and column, then the whole image."""
    tag = "<global-img>"
    fields = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_tag": tag,
        "global_image_token": tag,
        "image_seq_len": grid_size(config.vision_config) ** 2 // config.scale_factor**2,
    }
    kind = "SmolVLMProcessor" if config.model_type == "smolvlm" else "Idefics3Processor"
    return _ask(kind, images, found, fields)


def spell_internvl(config: Any, images: Any, found: Found) -> str:
    """All tiles in one run."""
    num_patches = grid_size(config.vision_config) ** 2
    num_features = int(num_patches * config.downsample_ratio**2)
    return f"<img>{MARK * num_features * int(found['num_patches'][0])}</img>"


def spell_pixtral(config: Any, images: Any, found: Found) -> str:
    """Row by row, each ended by a token of its own."""
    height, width = (int(size) // pixtral_patch(config) for size in found["image_sizes"][0])
    row = MARK * width
    return "[IMG_BREAK]".join([row] * height) + "[IMG_END]"


def spell_qwen(config: Any, images: Any, found: Found) -> str:
    """A square of patches is a feature; the tokens around it are the chat template's."""
    return MARK * int(found["image_grid_thw"][0].prod() // images.merge_size**2)


def spell_gemma3(config: Any, images: Any, found: Found) -> str:
    """A fixed number of features between two tokens and empty lines."""
    return f"\n\n<start_of_image>{MARK * config.mm_tokens_per_image}<end_of_image>\n\n"


def spell_paligemma(config: Any, images: Any, found: Found) -> str:
    """A patch is a feature; the prompt's first token comes after the images."""
    return MARK * grid_size(config.vision_config) ** 2


def spell_slots(config: Any, images: Any, found: Found) -> str:
    """A fixed number of soft tokens, and a new line."""
    return MARK * int(config.vision_config.num_positions) + "\n"


def spell_any(config: Any, processor: Any, found: Found) -> str:
    """As transformers' own `processor` does."""
    spelled = str(processor.replace_image_token(found, 0))
    return spelled.replace(processor.tokenizer.decode([config.image_token_id]), MARK)


def is_pixtral(config: Any) -> bool:
    """Whether the tower takes images of any size."""
    return bool(config.vision_config.model_type == "pixtral")


def pixtral_patch(config: Any) -> int:
    """Pixels along one side of what becomes a feature."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def grid_size(vision: Any) -> int:
    """Patches of a tower's own image, along one side."""
    sizes = (vision.image_size, vision.patch_size)
    image, patch = (size if isinstance(size, int) else size[0] for size in sizes)
    return int(image // patch)


def _llava_fields(config: Any) -> dict[str, Any]:
    """CLIP's towers have a feature more than patches, which most models leave out again."""
    return {
        "patch_size": config.vision_config.patch_size,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "num_additional_image_tokens": int(config.vision_config.model_type == "clip_vision_model"),
    }


def _ask(name: str, images: Any, found: Found, fields: Mapping[str, Any]) -> str:
    """What a processor of transformers makes of it."""
    # Its constructor wants a tokenizer, for which spelling has no use: its fields are enough.
    processor = object.__new__(getattr(transformers, name))
    processor.__dict__.update(fields, image_processor=images, image_token=MARK)
    return str(processor.replace_image_token(found, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How a kind of model takes images.

    `placeholder` is what a chat template puts where one goes, `spell` gives what takes its place.
    `options` are added to the image processor's own settings; of what it makes, the encoder takes
    `inputs`, all where none are named. Where a family `has_scaling` it is set to leave values as
    bytes, since it is known how to go on from there. It `nests_images` by prompt, or cuts an image
    into tiles and so `has_tiles` in a further axis. The inputs of several images are joined along
    `batch_axis`, where they can be.

    Positions of an image see each other with `whole_spans`, those of a prompt with
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
