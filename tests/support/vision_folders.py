"""Whole folders of tiny models that see: weights, processor, tokenizer and chat template."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from support.text_models import SPECIALS, byte_tokenizer
from support.vision_models import MODELS
from triptych.core.weights.resolve import ResolvedModel

VOCAB_SIZE = 320
IMAGE_ID = 300
_OPENING, _CLOSING = "<|im_start|>{{ m['role'] }}\n", "<|im_end|>\n{% endfor %}"
_REST = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PARTS = (
    "{% for m in messages %}"
    + _OPENING
    + "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}" + _CLOSING + _REST
)
"""Takes content as a list of parts and nothing else."""
STRINGS = "{% for m in messages %}" + _OPENING + "{{ m['content'] + '' }}" + _CLOSING + _REST
"""Takes content as a string and nothing else."""
EXTRA = ("<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<img>", "</img>")


def data_url(data: bytes, kind: str = "png") -> str:
    """An image as a request holds it."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(*urls: str, text: str = "What is this?", **fields: Any) -> dict[str, Any]:
    """The body of a chat that shows images to `tiny-eyes`."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": each}} for each in urls
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"model": "tiny-eyes", "messages": [message], "max_tokens": 9, **fields}


def write_vision_folder(
    folder: Path, family: str = "llava", *, template: str = PARTS, **text: Any
) -> ResolvedModel:
    """A model of `family` with random weights that reads bytes."""
    torch.manual_seed(1)
    config, images = MODELS[family]()
    config.image_token_id = IMAGE_ID
    fields = {"vocab_size": VOCAB_SIZE, "eos_token_id": 0, **text}
    for name, value in fields.items():
        setattr(config.text_config, name, value)
    kind = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[config.model_type])
    kind(config).eval().save_pretrained(folder)
    images.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in EXTRA])
    tokenizer.save(str(folder / "tokenizer.json"))
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>" if "qwen" in family else "<image>"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": template.replace("PLACEHOLDER", placeholder),
                "eos_token": SPECIALS[0],
            }
        )
    )
    return ResolvedModel(name="tiny-eyes", reference="x", folder=str(folder), digest=family)
