"""Tiny processors and a tokenizer for models that see, of families that run on transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from support.vision_models import IMAGE_ID, VOCAB_SIZE

SQUARE = {"height": 28, "width": 28}
SPECIAL = (
    *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL", "<|IMG_PATCH|>"),
    *("<begin>", "<end>"),
)
BEGIN_ID, END_ID = IMAGE_ID + 6, IMAGE_ID + 7
_TOKENS = {
    "boi_token": "<begin>",
    "eoi_token": "<end>",
    "image_start_token": "<begin>",
    "image_end_token": "<end>",
    "img_line_break_token": "TILE",
    "video_token": "w1",
    "video_start_token": "w2",
    "video_end_token": "w3",
}
AXES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}


def tokenizer(image_word: str = "<image>", **tokens: str) -> Any:
    """One word per id; the model's special words among the last."""
    words = [f"w{index}" for index in range(VOCAB_SIZE)]
    words[0] = "<unk>"
    special = (image_word, *SPECIAL[1:])
    words[IMAGE_ID : IMAGE_ID + len(special)] = special
    made = Tokenizer(models.WordLevel(dict(zip(words, range(VOCAB_SIZE), strict=True)), "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<unk>", extra_special_tokens=tokens
    )


def bare(name: str, images: Any, *, image_word: str = "<image>", **fields: Any) -> Any:
    """A processor without the parts for videos and sound; `image_word` stands for a feature."""
    kind = getattr(transformers, name)
    plain = type(name, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    others = dict.fromkeys(kind.get_attributes())
    parts = {
        **others,
        "image_processor": images,
        "tokenizer": tokenizer(image_word, image_token=image_word, **_TOKENS),
    }
    return plain(**parts, **fields)


@dataclass(frozen=True, slots=True)
class TorchvisionImages:
    """The settings of an image processor that exists for torchvision alone."""

    name: str
    fields: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**self.fields, "image_processor_type": self.name}

    def __getattr__(self, name: str) -> Any:
        return self.fields[name]


def qwen_images(kind: str, patch_size: int, **fields: Any) -> Any:
    area = (2 * patch_size) ** 2
    size = {"shortest_edge": 4 * area, "longest_edge": 16 * area}
    return getattr(transformers, kind)(size=size, patch_size=patch_size, **fields)
