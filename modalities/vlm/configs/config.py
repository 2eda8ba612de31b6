"""A model folder's configurations for images, as transformers' objects.

Owns reading the model's own configuration and its image processor's. Classes come from the
installed transformers by name; no code of a checkpoint is ever executed. Needs no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.core.errors import WeightsError
from triptych.core.weights.config_fields import LEGACY, KnownFields
from triptych.core.weights.layout import read_json
from triptych.core.weights.library_errors import library_errors
from triptych.core.weights.unserved import check_served
from triptych.modalities.vlm.configs.processor_files import processor_fields, processor_name
from triptych.modalities.vlm.configs.slots import SlotConfig


def read_config(config: Mapping[str, Any]) -> Any:
    """A `config.json` as transformers' own configuration. Raises `WeightsError`.

    How its weights are quantized is not read here: the checkpoint knows it.
    """
    model_type = config.get("model_type")
    kind = _kind_of(model_type)
    known, text_kind = KnownFields.of(kind), kind.sub_configs["text_config"]
    if "text_config" not in config:  # older files have its fields at the top level
        has_fields = hasattr(text_kind, "__dataclass_fields__")
        known |= LEGACY | KnownFields.of(text_kind) if has_fields else LEGACY
    with library_errors(f"config.json is invalid as {model_type}"):
        return kind(**known.of_file(config))


def _kind_of(model_type: Any) -> Any:
    """The configuration class of a model type with a language model and a vision encoder."""
    if model_type == SlotConfig.model_type:
        return SlotConfig
    check_served(model_type)
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
        if {"text_config", "vision_config"} <= set(kind.sub_configs):
            return kind
    raise WeightsError(
        f"model_type {model_type!r} in config.json: it is no model of text_config and vision_config"
        " that transformers knows, as those are that see images here."
    )


def open_image_processor(folder: Path) -> Any:
    """The image processor of a model, by Pillow if there is such a class.

    Raises `WeightsError`.
    """
    fields = processor_fields(folder)
    name = processor_name(fields)
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    if not name.endswith("ImageProcessor") or kind is None:
        raise WeightsError(f"Unknown image processor {name or '(none named)'}.")
    with library_errors("preprocessor_config.json is invalid"):
        return kind.from_dict(dict(fields))


def open_processor(folder: Path, image_processor: Any) -> Any:
    """The whole processor of a model, with its tokenizer. Raises `WeightsError`."""
    fields = _json(folder, "processor_config.json")
    named = [fields, _json(folder, "tokenizer_config.json"), processor_fields(folder)]
    name = next((str(f["processor_class"]) for f in named if f.get("processor_class")), "")
    kind = getattr(transformers, name, None) if name.endswith("Processor") else None
    if kind is None or not (folder / "tokenizer.json").is_file():
        raise WeightsError(
            f"Unknown processor {name or '(none named)'}, or its tokenizer.json is missing."
        )
    tokens = {k: v for k, v in named[1].items() if k.endswith("_token") and isinstance(v, str)}
    extra = named[1].get("extra_special_tokens")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        extra_special_tokens=extra if isinstance(extra, dict) else {},
        **tokens,
    )
    accepted = inspect.signature(kind.__init__).parameters
    plain = {k: v for k, v in fields.items() if k in accepted and not isinstance(v, dict)}
    parts = {**dict.fromkeys(kind.get_attributes()), "image_processor": image_processor}
    with library_errors("processor_config.json is invalid"):
        return _without_parts(kind)(**{**plain, **parts, "tokenizer": tokenizer})


def _without_parts(kind: Any) -> Any:
    """The processor class `kind`, modified to accept missing parts for videos and sound."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})


def _json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}
