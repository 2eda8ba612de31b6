"""The files of a `--model-override` for a part of a model, fetched if they are on the hub.

Owns resolving an override to a folder or file, and its digest. Loads no torch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.content_digests import SMALL_FILES, content_digest
from triptych.core.weights.layout import weight_files
from triptych.core.weights.overrides import PartOverride

_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>.+)")


def part_folder(override: PartOverride, options: ModelOptions, own: Path) -> Path:
    """The part's folder, fetched if it is on the hub. Raises `WeightsError`."""
    if not override.path:
        return own
    folder = Path(override.path).expanduser()
    if folder.is_dir():
        return folder
    from triptych.core.weights.hub import download_snapshot  # imports an HTTP client

    return download_snapshot(override.path, replace(options, revision=""))


def part_weight_file(override: PartOverride, options: ModelOptions) -> Path | None:
    """The file with the part's weights, fetched if it is on the hub (`owner/name/file`)."""
    if not override.weight_path:
        return None
    file = Path(override.weight_path).expanduser()
    match = _HUB_FILE.fullmatch(override.weight_path)
    if not file.is_file() and match:
        from triptych.core.weights.hub import download_snapshot

        unpinned = replace(options, revision="")
        folder = download_snapshot(match["repository"], unpinned, [match["file"]])
        file = folder / match["file"]
    if not file.is_file():
        raise WeightsError(f"weight_path names no file: {file.name} does not exist.")
    if file.suffix not in (".safetensors", ".gguf"):
        raise WeightsError(f"{file.name} is neither safetensors nor GGUF; convert it to one.")
    return file


def identity(override: PartOverride, options: ModelOptions) -> str:
    """SHA-256 over the override's encoding and the content of its files, but not their folder."""
    folder, files = part_folder(override, options, Path()), list[Path]()
    if override.path:
        files += sorted(file for file in folder.glob("*") if file.suffix in SMALL_FILES)
    if (file := part_weight_file(override, options)) is not None:
        files.append(file)
    elif override.path and any(folder.glob("*.safetensors")):
        files += weight_files(folder)
    lines = [f"{file.name} {content_digest(file)}" for file in files]
    return hashlib.sha256("\n".join([override.quantization_encoding, *lines]).encode()).hexdigest()
