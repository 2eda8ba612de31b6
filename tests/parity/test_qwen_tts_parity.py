"""Qwen3-TTS on our decoder and paged cache against the released package: codes and sound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.decoder_rig import Row
from support.frame_rig import FrameRecorder, FrameRig, frame_ids
from support.qwen_tts import GOLDEN, INSTRUCTION, ROLE, SHORT_TEXT, TEXT, qwen_tts
from support.speech_models import setup_of
from support.spoken import config_of, request, say, sound
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.configs.qwen3_tts import QwenTtsConfig, read_qwen_config
from triptych.modalities.tts.engine.codecs.decoder import stream_row
from triptych.modalities.tts.engine.models.qwen3_tts import QwenTtsBlueprint, QwenTtsModel
from triptych.modalities.tts.wire import VoiceClip

CONFIG: QwenTtsConfig = read_qwen_config(GOLDEN["config"])


def prompt(
    text: Sequence[int], language: str = "", speaker: str = "", instruction: Sequence[int] = ()
) -> tuple[int, ...]:
    opening = CONFIG.opening(language, speaker)
    return (*instruction, *ROLE, *opening, *CONFIG.spoken(text), CONFIG.begin)


PROMPTS = {
    "named": prompt(TEXT, "english", "ada"),
    "dialect": prompt(SHORT_TEXT, "", "bob"),
    "designed": prompt(TEXT, instruction=INSTRUCTION),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    qwen_tts(folder)
    return folder


@pytest.fixture(scope="module")
def blueprint(folder: Path) -> QwenTtsBlueprint:
    return QwenTtsBlueprint(GOLDEN["config"], setup_of(folder))


@pytest.fixture(scope="module")
def model(folder: Path, blueprint: QwenTtsBlueprint) -> QwenTtsModel:
    with Checkpoint.open(folder) as checkpoint:
        return blueprint.build(checkpoint, lambda _: None)


@pytest.fixture
def rig(model: QwenTtsModel) -> FrameRig:
    layout = model.talker.config.kv_layout(4, torch.float32)
    recorder = partial(FrameRecorder, logits=model.head, vocab_size=33)
    return FrameRig(model, layout, recorder=recorder)


def assert_golden(row: Row, name: str) -> None:
    frames = GOLDEN["cases"][name]
    assert [list(codes) for codes in row.frames] == frames
    assert row.tokens[row.num_prompt_tokens :] == frame_ids(frames)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_frames_of_one_prompt_in_chunks(rig: FrameRig, name: str, chunk: int) -> None:
    row = rig.open(PROMPTS[name])
    while row.num_cached < row.num_prompt_tokens:
        rig.step((row, min(chunk, row.num_prompt_tokens - row.num_cached)))
    rig.decode(row, num_steps=len(GOLDEN["cases"][name]) - 1)
    assert_golden(row, name)


def test_rows_of_every_kind_in_one_batch(rig: FrameRig) -> None:
    rows = {name: rig.open(ids) for name, ids in PROMPTS.items()}
    named, dialect, designed = rows.values()
    rig.prefill(named)
    rig.step((named, 0), (dialect, 5))
    rig.step((named, 0), (dialect, len(dialect.tokens) - 5), (designed, 3))
    rig.step((named, 0), (dialect, 0), (designed, len(designed.tokens) - 3))
    rig.decode(named, dialect, designed, num_steps=11)
    rig.decode(dialect, designed, num_steps=2)
    rig.decode(designed, num_steps=1)
    for name, row in rows.items():
        assert_golden(row, name)


def test_a_prompt_that_is_cached(rig: FrameRig) -> None:
    first, second = rig.open(PROMPTS["named"]), rig.open(PROMPTS["named"])
    rig.prefill(first)
    rig.share(second, first, num_pages=2)
    rig.prefill(second)
    rig.decode(second, num_steps=14)
    assert_golden(second, "named")


def test_a_row_computed_again_goes_on_from_its_frames(rig: FrameRig) -> None:
    row = rig.open(PROMPTS["named"])
    rig.prefill(row)
    rig.decode(row, num_steps=4)
    rig.preempt(row)
    rig.prefill(row)
    rig.decode(row, num_steps=9)
    assert_golden(row, "named")


def test_random_frames_are_a_rows_own(rig: FrameRig) -> None:
    def speak(seed: int, *others: int) -> list[tuple[int, ...]]:
        rows = [rig.open(PROMPTS["named"], SamplingParams(seed=s)) for s in (seed, *others)]
        rig.prefill(*rows)
        rig.decode(*rows, num_steps=4)
        rig.free_slots += [row.slot for row in rows]
        return rows[0].frames

    alone = speak(1)
    assert speak(1, 2, 3) == alone
    assert speak(2) != alone


def test_speech_ends_with_the_first_codebooks_end_after_two_frames(
    rig: FrameRig, model: QwenTtsModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loud_end(hidden_RC: torch.Tensor) -> torch.Tensor:
        logits_RV = head(hidden_RC)
        logits_RV[:, -1] = 1e4
        return logits_RV

    head = model.head
    monkeypatch.setattr(model, "head", loud_end)
    row = rig.open(PROMPTS["named"])
    rig.prefill(row)
    rig.decode(row, num_steps=2)
    sampled = row.tokens[row.num_prompt_tokens :]
    assert [token_id == END_FRAME_ID for token_id in sampled] == [False, False, True]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[QwenTtsBlueprint, QwenTtsModel]:
    """A model that speaks in the voices of recordings."""
    folder = tmp_path_factory.mktemp("base")
    qwen_tts(folder, kind="base")
    with Checkpoint.open(folder) as checkpoint:
        blueprint = QwenTtsBlueprint(checkpoint.config, setup_of(folder))
        return blueprint, blueprint.build(checkpoint, lambda _: None)


SPEAKER_C = torch.randn(32, generator=torch.Generator().manual_seed(5))
HEARD_FQ = torch.randint(0, 32, (6, 4), generator=torch.Generator().manual_seed(6))
CLIPS = {"vector": (), "icl": (40, 41, 42)}
"""The words of a recording: without them its speaker's vector alone is imitated."""


def clip(name: str, *, salt: str = "") -> VoiceClip:
    ids = (*ROLE, *CONFIG.clip(CLIPS[name]))
    return VoiceClip(digest=name + salt, pcm=b"", sample_rate=24_000, prompt_ids=ids)


def open_recorded(rig: FrameRig, blueprint: QwenTtsBlueprint, name: str, salt: str = "") -> Row:
    encoded = torch.cat((SPEAKER_C, HEARD_FQ.flatten().float())).numpy()
    voice = blueprint.voice_prompt(clip(name, salt=salt), encoded)
    ids = (*voice.prompt_ids, *CONFIG.spoken(TEXT), *voice.suffix_ids)
    row = rig.open(ids, frames=voice.codes)
    row.num_prompt_tokens = len(ids)
    return row


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("name", CLIPS)
def test_the_voice_of_a_recording(
    base: tuple[QwenTtsBlueprint, QwenTtsModel], name: str, chunk: int
) -> None:
    blueprint, model = base
    layout = model.talker.config.kv_layout(4, torch.float32)
    recorder = partial(FrameRecorder, logits=model.head, vocab_size=33)
    rig = FrameRig(model, layout, recorder=recorder)
    open_recorded(rig, blueprint, name, salt="other")
    row = open_recorded(rig, blueprint, name)
    named = rig.open(PROMPTS["named"])
    rig.prefill(named)
    while row.num_cached < row.num_prompt_tokens:
        rig.step((named, 0), (row, min(chunk, row.num_prompt_tokens - row.num_cached)))
    rig.decode(row, num_steps=4)
    rig.preempt(row)
    rig.prefill(row)
    rig.decode(row, num_steps=9)
    frames = row.frames[-15:]
    assert [list(codes) for codes in frames] == GOLDEN["cases"][name]


def test_a_recording_is_encoded_as_by_the_package(
    base: tuple[QwenTtsBlueprint, QwenTtsModel],
) -> None:
    _, model = base
    assert model.speaker_encoder is not None
    mels = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(8))
    with torch.inference_mode():
        vector_C = model.speaker_encoder(mels)[0]
    torch.testing.assert_close(vector_C, torch.tensor(GOLDEN["speaker"]), atol=1e-4, rtol=1e-4)


def test_a_recording_has_the_packages_codes(
    base: tuple[QwenTtsBlueprint, QwenTtsModel],
) -> None:
    blueprint, _ = base
    codec = blueprint.open_codec(num_rows=1, report=lambda _: None)
    assert codec.encode is not None
    with torch.inference_mode():
        encoded = codec.encode(WAVE_S)
    assert encoded[32:].view(-1, 4).T.tolist() == GOLDEN["heard"]


WAVE_S = torch.randn(1500, generator=torch.Generator().manual_seed(9)) * 0.3


def decoded(blueprint: QwenTtsBlueprint, frames: Sequence[Sequence[int]]) -> np.ndarray:
    codec = blueprint.open_codec(num_rows=1, report=lambda _: None)
    codes_1QF = torch.tensor(frames).T[None]
    pcm: np.ndarray = stream_row(codec.decoder, codes_1QF, ()).numpy()  # type: ignore[arg-type]
    return pcm


def test_named_voices_through_the_engine(
    folder: Path, blueprint: QwenTtsBlueprint, tmp_path: Path
) -> None:
    names = ("named", "dialect", "designed")
    requests = [request(PROMPTS[name], max_steps=15) for name in names]
    for deltas, name in zip(say(folder, config_of(tmp_path), *requests), names, strict=True):
        expected = decoded(blueprint, GOLDEN["cases"][name])
        np.testing.assert_allclose(sound(deltas), expected, atol=1e-5)


@pytest.mark.parametrize("words", [(), (40, 41, 42)])
def test_the_voice_of_a_recording_through_the_engine(
    base: tuple[QwenTtsBlueprint, QwenTtsModel], tmp_path: Path, words: tuple[int, ...]
) -> None:
    blueprint, model = base
    codec = blueprint.open_codec(num_rows=1, report=lambda _: None)
    assert codec.encode is not None
    ids = (*ROLE, *CONFIG.clip(words))
    recording = VoiceClip(
        digest=f"{words}", pcm=WAVE_S.numpy().tobytes(), sample_rate=24_000, prompt_ids=ids
    )
    with torch.inference_mode():
        voice = blueprint.voice_prompt(recording, codec.encode(WAVE_S).numpy())
    layout = model.talker.config.kv_layout(4, torch.float32)
    rig = FrameRig(model, layout, recorder=partial(FrameRecorder, logits=model.head, vocab_size=33))
    spoken = tuple(CONFIG.spoken(SHORT_TEXT))
    row = rig.open((*voice.prompt_ids, *spoken, *voice.suffix_ids), frames=voice.codes)
    rig.prefill(row)
    rig.decode(row, num_steps=5)
    own = row.frames[-6:]
    whole = decoded(blueprint, [*voice.codes, *own])
    folder = tmp_path / "model"
    qwen_tts(folder, kind="base")
    config = config_of(tmp_path, prepend_prompt_speech_tokens="once")  # as in the package
    (deltas,) = say(folder, config, request(spoken, max_steps=6, clip=recording))
    np.testing.assert_allclose(sound(deltas), whole[len(voice.codes) * 24 :], atol=1e-5)


@pytest.mark.parametrize("chunks", [(), (1,) * 16, (5, 1, 8)])
def test_streamed_sound(blueprint: QwenTtsBlueprint, chunks: tuple[int, ...]) -> None:
    codec = blueprint.open_codec(num_rows=2, report=lambda _: None)
    codes_QF, pcm_S = torch.tensor(GOLDEN["codes"]), torch.tensor(GOLDEN["pcm"])
    assert (codec.decoder.hop, codec.decoder.latency) == (24, 0)
    streamed_S = stream_row(codec.decoder, codes_QF[None], chunks)  # type: ignore[arg-type]
    torch.testing.assert_close(streamed_S, pcm_S, atol=1e-5, rtol=0)
