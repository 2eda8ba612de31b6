"""What a model's folder says about pictures, in transformers' terms.

Owns the reading of its two configurations: the model's own and its image processor's. Classes come
from the installed transformers by their names; nothing of a checkpoint is ever executed. Torch is
not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json
from triptych.modalities.vlm.families import FAMILIES


def read_config(config: Mapping[str, Any]) -> Any:
    """A `config.json` as transformers' own configuration. Raises `WeightsError`."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES or model_type not in CONFIG_MAPPING:
        raise WeightsError(
            f"model_type {model_type!r} is no model with pictures that is known here:"
            f" {', '.join(FAMILIES)}."
        )
    if config.get("quantization_config"):
        raise WeightsError("config.json asks for a quantization_config, which is not supported.")
    kind = CONFIG_MAPPING[model_type]
    known = set(kind.__dataclass_fields__) | set(kind.attribute_map)
    try:
        return kind(**{k: v for k, v in config.items() if k in known and k[0] != "_"})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise WeightsError(f"config.json is not usable as {model_type}: {error}") from error


def open_image_processor(folder: Path) -> Any:
    """The image processor of a model, by Pillow and numpy. Raises `WeightsError`."""
    fields = _processor_fields(folder)
    name = str(fields.get("image_processor_type") or "").removesuffix("Fast").removesuffix("Pil")
    kind = getattr(transformers, f"{name}Pil", None)
    if not name.endswith("ImageProcessor") or kind is None:
        raise WeightsError(f"{name or 'No'} image processor is known here.")
    try:
        return kind.from_dict(dict(fields))
    except (TypeError, ValueError) as error:
        raise WeightsError(f"preprocessor_config.json is not usable: {error}") from error


def _processor_fields(folder: Path) -> Mapping[str, Any]:
    """From `preprocessor_config.json`, or the part of `processor_config.json` in newer files."""
    if (folder / "preprocessor_config.json").is_file():
        return read_json(folder / "preprocessor_config.json")
    if (folder / "processor_config.json").is_file():
        fields = read_json(folder / "processor_config.json").get("image_processor")
        if isinstance(fields, dict):
            return fields
    raise WeightsError("The model has no image processor: preprocessor_config.json is missing.")
