"""The option `--model-override PART.FIELD=VALUE`: replacements for one part of an image model.

Owns the syntax, and the fields: `path` (another folder), `weight_path` (another weight file) and
`quantization_encoding`. A part is what diffusers calls a component, such as `transformer` or `vae`.
Knows neither which parts a model has (model_index.json lists them) nor whether a file exists:
download, digest and loader apply the overrides. Loads no torch.
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
    """Replacements for one part; an empty field keeps the model's own.

    `path`: a folder or hub id for its folder. `weight_path`: a safetensors or GGUF file for its
    weights. `quantization_encoding`: the encoding of its weights in memory.
    """

    path: str = ""
    weight_path: str = ""
    quantization_encoding: str = ""


def read_overrides(options: ModelOptions) -> dict[str, PartOverride]:
    """The overrides by part. Raises `ConfigError` for malformed, unknown or repeated ones."""
    known = [field.name for field in fields(PartOverride)]
    found: dict[str, PartOverride] = {}
    for given in options.model_override:
        match = _SPELLING.fullmatch(given)
        if match is None or match["field"] not in known:
            raise ConfigError(
                f"--model-override {given!r:.80} is malformed; write PART.FIELD=VALUE with one of"
                f" the fields {', '.join(known)}."
            )
        part, field, value = match["part"], match["field"], match["value"]
        override = found.get(part, PartOverride())
        if getattr(override, field):
            raise ConfigError(f"--model-override gives {part}.{field} twice.")
        if field == "quantization_encoding" and value not in ENCODINGS:
            raise ConfigError(
                f"{part}.{field} must be one of {', '.join(ENCODINGS)}, not {value!r:.40}."
            )
        found[part] = replace(override, **{field: value})
    return found
