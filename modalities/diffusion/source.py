"""The embedded image model as `--model` names it: a folder that is part of the package.

Owns where that folder is. Loads no torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.layout import weight_files
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer
from triptych.core.weights.pipeline_index import is_pipeline, read_pipeline
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source

NAME = "triptych-images"
FOLDER = Path(__file__).parent / "embedded"


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The folder in the package, and the digest of its weights."""
    if not is_pipeline(FOLDER):
        raise WeightsError(f"{NAME} is missing from this installation; install the package anew.")
    parts = [part for part in read_pipeline(FOLDER).parts.values() if part.has_weights]
    files = [file for part in parts for file in weight_files(FOLDER / part.name)]
    lines = (f"{file.parent.name} {sha256_file(file, progress)}\n" for file in files)
    return FOLDER, hashlib.sha256("".join(lines).encode()).hexdigest()


def _adopt(folder: Path, options: ModelOptions, progress: Progress) -> None:
    """Other folders of this kind are in our layout already."""


EMBEDDED_IMAGES = Source(name=NAME, fetch=_fetch, adopt=_adopt)
