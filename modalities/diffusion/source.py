"""Sources of image models for `--model`: the embedded one, and single-file checkpoints.

Owns the embedded folder, and which files are converted. Loads no torch until a conversion.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lazy import load
from triptych.core.weights.cache import convert_once
from triptych.core.weights.layout import weight_files
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer
from triptych.core.weights.pipeline_index import is_pipeline, read_pipeline
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source

NAME = "triptych-images"
CONVERTER_VERSION = 1
"""Incremented whenever the same file is converted into other parts."""
_SPLIT_CHECKPOINT = "triptych.modalities.diffusion.engine.loading.whole:split_checkpoint"
FOLDER = Path(__file__).parent / "embedded"


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The embedded folder, and the digest of its weights."""
    if not is_pipeline(FOLDER):
        raise WeightsError(f"{NAME} is missing from this installation; reinstall the package.")
    parts = [part for part in read_pipeline(FOLDER).parts.values() if part.has_weights]
    files = [file for part in parts for file in weight_files(FOLDER / part.name)]
    lines = (f"{file.parent.name} {sha256_file(file, progress)}\n" for file in files)
    return FOLDER, hashlib.sha256("".join(lines).encode()).hexdigest()


def _adopt(place: Path, options: ModelOptions, progress: Progress) -> tuple[Path, str] | None:
    """Convert a safetensors file of a whole model, once; `None` for other places."""
    if place.suffix != ".safetensors" or not place.is_file():
        return None

    def build(folder: Path) -> None:
        load(_SPLIT_CHECKPOINT)(place, folder, options)

    progress.start("Reading", place.stat().st_size)
    identity = f"whole checkpoint {CONVERTER_VERSION} {sha256_file(place, progress)}"
    return convert_once(place.name, identity, build, options, progress)


EMBEDDED_IMAGES = Source(name=NAME, fetch=_fetch, adopt=_adopt)
