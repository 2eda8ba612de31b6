"""The embedded voice as `--model` names it: a folder of the package.

Owns where that folder is. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.layout import weight_files
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source

NAME = "triptych-voice"
FOLDER = Path(__file__).parents[1] / "embedded"


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The folder in the package, and the digest of its weights."""
    files = weight_files(FOLDER) if FOLDER.is_dir() else ()
    if len(files) != 1:
        raise WeightsError(f"{NAME} is missing from this installation; reinstall the package.")
    return FOLDER, sha256_file(files[0], progress)


EMBEDDED_VOICE = Source(name=NAME, fetch=_fetch)
