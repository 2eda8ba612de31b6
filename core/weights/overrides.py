"""What `--model-override` says: other files for one part of a model, or another type for it.

Owns the option's spelling. Which parts a model has is its model_index.json's business, what a file
holds the loader's. Loads no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

from triptych.core.block_formats import BLOCK_ENCODINGS
from triptych.core.errors import ConfigError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.encoding import FLOAT8

PLAIN_TYPES = ("float32", "bfloat16", "float16")
ENCODINGS = (*PLAIN_TYPES, *BLOCK_ENCODINGS, FLOAT8)
_SPELLING = re.compile(r"(?P<part>\w+)\.(?P<field>\w+)=(?P<value>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOverride:
    """What a part takes instead of its own; empty: its own.

    `path`: a folder or hub id for its folder. `weight_path`: a safetensors or GGUF file for its
    weights. `quantization_encoding`: how it is held.
    """

    path: str = ""
    weight_path: str = ""
    quantization_encoding: str = ""


def read_overrides(options: ModelOptions) -> dict[str, PartOverride]:
    """The overrides by part. Raises `ConfigError` for what is misspelt, unknown or given twice."""
    known = [field.name for field in fields(PartOverride)]
    found: dict[str, PartOverride] = {}
    for given in options.model_override:
        match = _SPELLING.fullmatch(given)
        if match is None or match["field"] not in known:
            raise ConfigError(
                f"--model-override {given!r:.80} is not understood; write PART.FIELD=VALUE with one"
                f" of the fields {', '.join(known)}."
            )
        part, field, value = match["part"], match["field"], match["value"]
        override = found.get(part, PartOverride())
        if getattr(override, field):
            raise ConfigError(f"--model-override gives {part}.{field} twice.")
        if field == "quantization_encoding" and value not in ENCODINGS:
            raise ConfigError(
                f"{part}.{field} is one of {', '.join(ENCODINGS)}, not {value!r:.40}."
            )
        found[part] = replace(override, **{field: value})
    return found
