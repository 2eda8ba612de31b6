"""The weights of voice-activity detection, from a released package.

Owns the pinned package and the one-time conversion into the cache. The package also has a
safetensors file, whose weights are of an earlier training: its probabilities differ from the
released model's by up to 0.2. So the weights are taken from the ONNX file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.numpy import save_file

from triptych.core.options.config import ModelOptions
from triptych.core.weights.cache import fetch_once
from triptych.core.weights.layout import SINGLE_NAME
from triptych.core.weights.packages import Installer, Package, fetch_file, run_installer
from triptych.core.weights.progress import Progress
from triptych.core.weights.resolve import Source
from triptych.modalities.talk.hearing.voice_activity import VoiceNetwork

NAME = "silero-vad"
CONVERTER_VERSION = 1
PACKAGE = Package(
    name="silero-vad",
    version="6.2.3",
    member="silero_vad/data/silero_vad_16k_op15.onnx",
    wheel_sha256="7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    file_sha256="7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
    wheel_bytes=11_317_527,
)
_PREFIX = "model."


def _fetch(options: ModelOptions, progress: Progress, install: Installer) -> tuple[Path, str]:
    """The converted folder and its digest, from the cache after the first time."""

    def build(folder: Path) -> None:
        from triptych.core.weights.onnx_graph import OnnxGraph  # a warm start never needs it

        workspace = folder / "fetched"
        graph = OnnxGraph(fetch_file(PACKAGE, workspace, progress, install))
        tensors = {name.removeprefix(_PREFIX): graph.tensor(name) for name in graph.floats}
        save_file(tensors, folder / SINGLE_NAME)
        shutil.rmtree(workspace)

    return fetch_once(
        NAME, f"silero {CONVERTER_VERSION} {PACKAGE.identity}", build, options, progress
    )


SILERO_VAD = Source(name=NAME, fetch=_fetch, download_bytes=PACKAGE.wheel_bytes, license="MIT")


def open_network(
    options: ModelOptions, progress: Progress, install: Installer = run_installer
) -> VoiceNetwork:
    """Fetch the weights if they are not in the cache, and read them; this blocks.

    Raises `WeightsError` with what to do.
    """
    folder, _ = SILERO_VAD.fetch(options, progress, install)
    return VoiceNetwork.load(folder / SINGLE_NAME)
