"""The libraries of a process that prepares images, chosen before transformers is imported.

Owns hiding torch, which takes seconds and memory to load, and giving it to the models whose image
processors need it. For dedicated processes only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from triptych.core.process.lazy import load
from triptych.modalities.vlm.configs.processor_files import needs_torch

_HIDDEN = ("torch", "torchvision", "torchaudio")


def choose_libraries(folders: Iterable[str]) -> None:
    """Make every later import of torch fail, unless a model in `folders` needs it."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    if any(needs_torch(Path(folder)) for folder in folders):
        load("triptych.modalities.vlm.processing.torchvision_functions:install")()
        return
    for name in _HIDDEN:
        sys.modules[name] = cast("Any", None)  # the import system's mark for "not found"
