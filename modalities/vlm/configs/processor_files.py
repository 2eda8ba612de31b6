"""A model folder's files about its image processor, read before transformers is imported.

Owns the processor's name, and whether transformers has it for Pillow or for torchvision alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.process.once import once
from triptych.core.weights.layout import read_json


def processor_fields(folder: Path) -> Mapping[str, Any]:
    """Read `preprocessor_config.json`, or the part of `processor_config.json` in newer files.

    Raises `WeightsError` if there is neither.
    """
    if (folder / "preprocessor_config.json").is_file():
        return read_json(folder / "preprocessor_config.json")
    if (folder / "processor_config.json").is_file():
        fields = read_json(folder / "processor_config.json").get("image_processor")
        if isinstance(fields, dict):
            return fields
    raise WeightsError("The model has no image processor: preprocessor_config.json is missing.")


def processor_name(fields: Mapping[str, Any]) -> str:
    """The name of an image processor without that of its library."""
    named = str(fields.get("image_processor_type") or "")
    return named.removesuffix("Fast").removesuffix("Pil")


def needs_torch(folder: Path) -> bool:
    """Whether transformers has a model's image processor for torchvision alone."""
    return f"{processor_name(processor_fields(folder))}Pil" not in _pillow_classes()


@once
def _pillow_classes() -> frozenset[str]:
    """The image processors of transformers that need Pillow and numpy alone, from its files."""
    spec = find_spec("transformers")
    places = spec.submodule_search_locations if spec is not None else None
    found = set()
    for place in places or ():
        for file in Path(place).glob("models/*/image_processing_pil_*.py"):
            lines = file.read_text(encoding="utf-8").splitlines()
            found |= {line[6:].partition("(")[0] for line in lines if line.startswith("class ")}
    return frozenset(found)
