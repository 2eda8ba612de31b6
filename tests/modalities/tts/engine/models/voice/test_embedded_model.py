"""The voice that ships: as small as promised, and it speaks."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import pytest
import torch

from support.frame_rig import FrameRecorder, FrameRig
from support.speech_models import setup_of
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import read_layout
from triptych.core.weights.packages import run_installer
from triptych.core.weights.progress import SilentProgress
from triptych.modalities.tts.engine.models.voice.blueprint import VoiceBlueprint
from triptych.modalities.tts.sources import voice as source

HELLO = "həlˈO ðˈɛɹ."  # noqa: RUF001 - phonemes


def fetch() -> str:
    folder, digest = source.EMBEDDED_VOICE.fetch(ModelOptions(), SilentProgress(), run_installer)
    assert folder == source.FOLDER
    return digest


def test_it_is_as_small_as_promised() -> None:
    assert len(fetch()) == 64
    assert sum(file.stat().st_size for file in source.FOLDER.iterdir()) <= 40e6
    counts: Counter[str] = Counter()
    for name, info in read_layout(source.FOLDER).items():
        assert info.dtype == "BF16"
        counts[name.partition(".")[0]] += info.num_bytes // 2
    assert counts.keys() == {"talker", "codec"}
    assert counts["talker"] <= 14e6
    assert counts["codec"] <= 6e6


def test_it_speaks_in_steps() -> None:
    with Checkpoint.open(source.FOLDER) as checkpoint:
        blueprint = VoiceBlueprint(checkpoint.config, setup_of(source.FOLDER))
        model = blueprint.build(checkpoint, lambda _: None)
    assert blueprint.config.codec.step_s >= 1 / 25
    fields = json.loads((source.FOLDER / "config.json").read_text(encoding="utf-8"))
    symbols = [fields["vocab"][symbol] for symbol in HELLO]
    logits = model.io["output"].scores
    rig = FrameRig(
        model,
        model.stack.config.kv_layout(4, torch.float32),
        recorder=partial(FrameRecorder, logits=logits, vocab_size=blueprint.num_logits),
    )
    row = rig.open((*fields["prompt_prefix"], *symbols, *fields["prompt_suffix"]))
    rig.prefill(row)
    while row.tokens[-1] != END_FRAME_ID:
        rig.decode(row)
        assert len(row.frames) < 60, "three seconds are too long for this"
    decoder = blueprint.open_codec(num_rows=1, report=lambda _: None).decoder
    decoder.init_state([0])
    codes = torch.tensor(row.frames).T[None]
    chunks = [decoder.push(step, [0]).row(0) for step in codes.split(1, -1)]
    pcm = torch.cat([*chunks, decoder.flush([0]).row(0)])
    assert 0.4 < len(pcm) / decoder.sample_rate < 2
    assert 0.01 < pcm.square().mean().sqrt() < 0.3
    assert pcm.abs().max() < 1


@torch.inference_mode()
def test_a_stream_sounds_the_same_with_others_to_the_last_bit() -> None:
    with Checkpoint.open(source.FOLDER) as checkpoint:
        blueprint = VoiceBlueprint(checkpoint.config, setup_of(source.FOLDER))
    codec = blueprint.config.codec
    decoder = blueprint.open_codec(num_rows=4, report=lambda _: None).decoder
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(codec.num_levels, (4, codec.num_codebooks, 8), generator=random)

    def decoded(chosen: list[int]) -> list[torch.Tensor]:
        rows = list(range(len(chosen)))
        decoder.init_state(rows)
        steps = [decoder.push(step, rows) for step in codes[chosen].split(4, -1)]
        steps.append(decoder.flush(rows))
        return [torch.cat([step.row(row) for step in steps]) for row in rows]

    together = decoded([0, 1, 2, 3])
    for row in range(4):
        assert torch.equal(decoded([row])[0], together[row])


def test_a_package_without_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(source, "FOLDER", tmp_path_factory.mktemp("empty") / "embedded")
    with pytest.raises(WeightsError, match="reinstall the package"):
        fetch()
