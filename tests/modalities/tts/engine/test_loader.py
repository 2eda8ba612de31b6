"""Loading a speech-token model: memory asked for and given back, progress, options named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2TokenizerConfig, MimiConfig

from support.codec_models import mimi
from support.qwen_tts import GOLDEN, qwen_tts
from support.speech_models import csm, orpheus
from support.tiers import among
from triptych.core.errors import ConfigError, MemoryBudgetExceeded, ModelTooLarge, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import (
    CacheOptions,
    Config,
    DeviceOptions,
    ModelOptions,
    ScheduleOptions,
    SpeechOptions,
)
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.engine.codecs.loading import CodecBlueprint
from triptych.modalities.tts.engine.loader import open_speech_loader
from triptych.modalities.tts.plan import AudioPlan
from triptych.schedulers.base import ModelLoader

MIB = 2**20
OWNERS = {"activations", "codec", "codec-state", "kv", "voices", "weights"}


@pytest.fixture(scope="module", params=[csm, orpheus])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    request.param(folder)
    return folder


@pytest.fixture(scope="module")
def orpheus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orpheus")
    orpheus(folder)
    return folder


def loader(folder: Path, ledger: Ledger, cache_dir: Path, **speech: Any) -> ModelLoader:
    config = Config(
        models=ModelOptions(cache_dir=str(cache_dir), dtype="float32"),
        device=DeviceOptions(cpu_kernels="torch"),
        cache=CacheOptions(kv_cache_page_size=4),
        schedule=ScheduleOptions(max_batch_size=2, max_batch_input_tokens=16),
        speech=SpeechOptions(max_streams=2, **speech),
    )
    resolved = ResolvedModel(name="m", reference=str(folder), folder=str(folder), digest="d")
    return open_speech_loader(resolved, config, Device(torch.device("cpu")), ledger)


def test_memory_is_asked_for_and_given_back(folder: Path, tmp_path: Path) -> None:
    ledger, progress = Ledger(256 * MIB), []
    loaded = loader(folder, ledger, tmp_path).load(progress.append)
    assert {owner.removeprefix("m/") for owner in ledger.by_owner()} == OWNERS
    assert progress == sorted(progress)
    assert progress[-1] == pytest.approx(1)
    loaded.close()
    assert not ledger.by_owner()
    with pytest.raises(AttributeError):
        loaded.runner.launch(AudioPlan(step_id=1, model="m", kind="audio", rows=()))


@pytest.mark.parametrize("kind", ["base", "custom_voice"])
def test_recordings_are_encoded_in_reserved_memory(tmp_path: Path, kind: str) -> None:
    qwen_tts(tmp_path, kind=kind)
    loaded = loader(tmp_path, ledger := Ledger(256 * MIB), tmp_path).load(lambda _: None)
    num_filters = GOLDEN["codec"]["encoder_config"]["num_filters"]
    recording_bytes = 4 * num_filters * 60 * 24_000
    assert (ledger.by_owner()["m/activations"] > 4 * recording_bytes) == (kind == "base")
    loaded.close()
    if kind == "base":
        with pytest.raises(ModelTooLarge, match="can never fit") as refused:
            loader(tmp_path, Ledger(64 * MIB), tmp_path).load(lambda _: None)
        assert "Lower" not in refused.value.message  # smaller steps would not help


def test_the_memory_of_a_recording_is_that_of_the_encoders_first_layer() -> None:
    mimi_bytes = CodecBlueprint(MimiConfig().to_dict()).encode_bytes()
    assert 1.1 < mimi_bytes / (1152 * 60 * 24_000) < 1.2  # as measured for each sample
    acoustic = {"encoder_hidden_size": 64, "downsampling_ratios": [8, 5, 4, 2, 3]}
    config = HiggsAudioV2TokenizerConfig(acoustic_model_config=acoustic).to_dict()
    assert 1.0 < CodecBlueprint(config).encode_bytes() / (1290 * 60 * 24_000) < 1.1
    assert CodecBlueprint({"vq_strides": [1], "decoder_rates": [2]}).encode_bytes() == 0


def test_without_room_nothing_is_held(folder: Path, tmp_path: Path) -> None:
    ledger = Ledger(8 * MIB)
    with pytest.raises(MemoryBudgetExceeded):
        loader(folder, ledger, tmp_path).load(lambda _: None)
    assert not ledger.by_owner()


@pytest.mark.parametrize("share", among([0.05, 0.5, 0.9, 0.999, 1.0], [0.9, 1.0]))
def test_what_never_fits_is_known_beforehand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The check reads no weights, the codec's neither, and agrees with the load."""
    loaded = loader(folder, plenty := Ledger(256 * MIB), tmp_path).load(lambda _: None)
    held = plenty.by_owner()
    loaded.close()
    ledger = Ledger(int(share * (sum(held.values()) - held["m/kv"])))
    model = loader(folder, ledger, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "read", _unread)
        with pytest.raises(ModelTooLarge, match="m can never fit") as found:
            model.check_size()
        with pytest.raises(ModelTooLarge, match=re.escape(found.value.message)):
            model.load(lambda _: None)
        loader(folder, plenty, tmp_path).check_size()
    assert ledger.available_bytes == ledger.capacity_bytes


def _unread(*_: Any) -> Any:
    raise AssertionError("weights are read")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"buffer": 3}, "buffer"),
        ({"block_causal": True}, "block_causal"),
        ({"prepend_prompt_speech_tokens": "rolling"}, "prepend_prompt_speech_tokens rolling"),
        ({"prepend_prompt_speech_tokens_causal": True}, "prepend_prompt_speech_tokens_causal"),
    ],
)
def test_options_of_windows_are_refused_by_name(
    orpheus_folder: Path, tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}:"):
        loader(orpheus_folder, Ledger(256 * MIB), tmp_path, **options).load(lambda _: None)


def test_an_audio_decoder_of_the_users(orpheus_folder: Path, tmp_path: Path) -> None:
    ledger, bare = Ledger(256 * MIB), tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (bare / name).write_bytes((orpheus_folder / name).read_bytes())
    with pytest.raises(ConfigError, match="--audio-decoder"):
        loader(bare, ledger, tmp_path).load(lambda _: None)
    codec = orpheus_folder / "snac"
    tensors = load_file(codec / "model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, tmp_path / "mine.safetensors")
    (tmp_path / "more.json").write_text(json.dumps({"sampling_rate": 99}))
    options = {
        "audio_decoder": str(codec),
        "audio_decoder_weights": str(tmp_path / "mine.safetensors"),
        "audio_decoder_config": str(tmp_path / "more.json"),
    }
    loaded = loader(bare, ledger, tmp_path, **options).load(lambda _: None)
    decoder = loaded.runner._audio._decoder  # type: ignore[attr-defined]
    assert decoder.sample_rate == 99
    loaded.close()


def test_an_audio_decoder_of_too_few_codebooks_is_refused(
    orpheus_folder: Path, tmp_path: Path
) -> None:
    mimi().save_pretrained(tmp_path / "mimi")
    ledger = Ledger(256 * MIB)
    options = {"audio_decoder": str(tmp_path / "mimi")}
    with pytest.raises(ConfigError, match="has 4 codebooks, but this model generates 7"):
        loader(orpheus_folder, ledger, tmp_path, **options).load(lambda _: None)
    assert not ledger.by_owner()


def test_a_model_that_does_not_speak_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "parrot"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightsError, match=r"'parrot' is not a known speech model.*csm, higgs_audio_v2, kokoro"
    ):
        loader(tmp_path, Ledger(MIB), tmp_path).load(lambda _: None)
