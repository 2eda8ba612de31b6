"""The parts of a pipeline folder, from its model_index.json.

Owns reading that file and the choice of needed parts. The modality decides whether a part's class
may be opened; this module imports and runs none of the classes.

Format: diffusers' `DiffusionPipeline.save_pretrained`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json

PIPELINE_INDEX = "model_index.json"
_PLAIN = re.compile(r"scheduler|(ocr_)?guider|(text_)?processor|tokenizer(_\d)?")
_WEIGHTS = re.compile(r"transformer|unet|vae|text_encoder(_\d)?|vision_language_encoder")
_UNUSED = frozenset({
    "feature_extractor",
    "image_encoder",
    "image_processor",
    "pe",  # rewrites prompts
    "pe_tokenizer",
    "safety_checker",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PipelineComponent:
    """One model, tokenizer or configuration: its folder, and its class in diffusers."""

    name: str
    library: str
    class_name: str

    @property
    def has_weights(self) -> bool:
        """Whether its folder holds tensors."""
        return _WEIGHTS.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """A pipeline's class name, its used parts, and plain settings such as `is_distilled`.

    Parts that the file leaves empty are absent.
    """

    pipeline: str
    parts: Mapping[str, PipelineComponent]
    facts: Mapping[str, Any]


def is_part(name: str) -> bool:
    """Whether a pipeline part of this name is used."""
    return bool(_WEIGHTS.fullmatch(name) or _PLAIN.fullmatch(name))


def is_pipeline(folder: Path) -> bool:
    """Whether a folder holds a pipeline."""
    return (folder / PIPELINE_INDEX).is_file()


def read_pipeline(folder: Path) -> PipelineIndex:
    """The index of the pipeline in `folder`. Raises `WeightsError` if damaged or unknown."""
    fields = read_json(folder / PIPELINE_INDEX)
    pipeline = fields.get("_class_name")
    if not isinstance(pipeline, str):
        raise WeightsError(f"{PIPELINE_INDEX} does not name the pipeline's class.")
    parts, facts = {}, {}
    for name, value in fields.items():
        if name.startswith("_") or name in _UNUSED:
            continue
        if not isinstance(value, list) or _is_numbers(value):
            facts[name] = value
        elif part := _read_part(name, value):
            parts[name] = part
    return PipelineIndex(pipeline=pipeline, parts=parts, facts=facts)


def _is_numbers(value: list[Any]) -> bool:
    return all(isinstance(each, int | float) for each in value)


def _read_part(name: str, value: list[Any]) -> PipelineComponent | None:
    match value:
        case [None, None]:
            return None
        case [str(library), str(class_name)] if is_part(name):
            return PipelineComponent(name, library, class_name)
        case [str(), str()]:
            raise WeightsError(f"{PIPELINE_INDEX} has the unknown part {name!r:.60}.")
    raise WeightsError(f"{PIPELINE_INDEX} is damaged: {name!r:.60} is not [library, class].")


@contextmanager
def prefix_errors(part: str) -> Iterator[None]:
    """Prefix every `WeightsError` of the block with the name of the part."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{part}: {error.message}") from error
