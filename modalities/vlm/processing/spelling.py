"""How a picture is spelled in a prompt: separators of the model's, and a mark for each feature.

Owns one function per way of spelling. Each takes the model's configuration, its image processor
and what that made of one picture. The longer ones ask transformers' own processors. Torch is not
needed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The whole picture, then its tiles row by row, the filling cut off again."""
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
    """Tiles, each after its row and column, then the whole picture."""
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
    """A patch is a feature; the prompt's first token comes after the pictures."""
    return MARK * grid_size(config.vision_config) ** 2


def spell_slots(config: Any, images: Any, found: Found) -> str:
    """A fixed number of soft words, and a new line."""
    return MARK * int(config.vision_config.num_positions) + "\n"


def spell_any(config: Any, processor: Any, found: Found) -> str:
    """As transformers' own `processor` does."""
    spelled = str(processor.replace_image_token(found, 0))
    return spelled.replace(processor.tokenizer.decode([config.image_token_id]), MARK)


def is_pixtral(config: Any) -> bool:
    """Whether the tower takes pictures of any size."""
    return bool(config.vision_config.model_type == "pixtral")


def pixtral_patch(config: Any) -> int:
    """Pixels along one side of what becomes a feature."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))


def grid_size(vision: Any) -> int:
    """Patches of a tower's own picture, along one side."""
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
    """What a processor of transformers makes of it.

    Its constructor wants a tokenizer, for which spelling has no use: its fields are enough.
    """
    processor = object.__new__(getattr(transformers, name))
    processor.__dict__.update(fields, image_processor=images, image_token=MARK)
    return str(processor.replace_image_token(found, 0))
