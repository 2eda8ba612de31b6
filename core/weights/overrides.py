"""What `--model-override` says: other files for one part of a model, or another type for it.

Owns the option's spelling. Which parts a model has is its model_index.json's business, what a file
holds the loader's. Loads no torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

from triptych.core.block_formats import BLOCK_ENCODINGS
from triptych.core.config import ModelOptions
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.weights.encoding import FLOAT8
from triptych.core.weights.layout import weight_files
from triptych.core.weights.samples import SMALL_FILES, content_digest

PLAIN_TYPES = ("float32", "bfloat16", "float16")
ENCODINGS = (*PLAIN_TYPES, *BLOCK_ENCODINGS, FLOAT8)
_SPELLING = re.compile(r"(?P<part>\w+)\.(?P<field>\w+)=(?P<value>.+)")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOverride:
    """What a part takes instead of its own; empty: its own.

    `path`: a folder or hub id for its folder. `weight_path`: a safetensors or GGUF file for its
    weights. `quantization_encoding`: how it is held.
    """

    path: str = ""
    weight_path: str = ""
    quantization_encoding: str = ""

    def folder(self, options: ModelOptions, own: Path) -> Path:
        """The part's folder, fetched where it is on the hub. Raises `WeightsError`."""
        if not self.path:
            return own
        folder = Path(self.path).expanduser()
        if folder.is_dir():
            return folder
        from triptych.core.weights.hub import download_snapshot  # imports an HTTP client

        return download_snapshot(self.path, replace(options, revision=""))

    def weight_file(self, options: ModelOptions) -> Path | None:
        """The file with the part's weights, fetched where it is on the hub (`owner/name/file`)."""
        if not self.weight_path:
            return None
        file = Path(self.weight_path).expanduser()
        match = _HUB_FILE.fullmatch(self.weight_path)
        if not file.is_file() and match:
            from triptych.core.weights.hub import download_snapshot

            unpinned = replace(options, revision="")
            folder = download_snapshot(match["repository"], unpinned, [match["file"]])
            file = folder / match["file"]
        if not file.is_file():
            raise WeightsError(f"There is no file {file.name} at the weight_path given.")
        if file.suffix not in (".safetensors", ".gguf"):
            raise WeightsError(f"{file.name} is neither safetensors nor GGUF; convert it to one.")
        return file


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


def identity(override: PartOverride, options: ModelOptions) -> str:
    """What changes when what the override brings does, wherever it lies, as a SHA-256."""
    folder, files = override.folder(options, Path()), list[Path]()
    if override.path:
        files += sorted(file for file in folder.glob("*") if file.suffix in SMALL_FILES)
    if (file := override.weight_file(options)) is not None:
        files.append(file)
    elif override.path and any(folder.glob("*.safetensors")):
        files += weight_files(folder)
    lines = [f"{file.name} {content_digest(file)}" for file in files]
    return hashlib.sha256("\n".join([override.quantization_encoding, *lines]).encode()).hexdigest()
