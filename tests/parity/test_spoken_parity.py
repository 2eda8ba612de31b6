"""A request through the real engine gives what transformers generates and the codec decodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from support.codec_models import random_model
from support.frame_rig import FrameRecorder, FrameRig, frame_ids
from support.speech_models import ORPHEUS_CODES, ORPHEUS_STOP, csm, higgs, orpheus, setup_of
from support.spoken import config_of, request, say, sound
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.models.csm import CsmBlueprint
from triptych.modalities.tts.wire import VoiceClip

WORDS = (41, 1, 5, 9, 30, 42, 43)


@pytest.fixture(scope="module")
def orpheus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orpheus")
    orpheus(folder)
    return folder


def orpheus_pcm(folder: Path, prompt: Sequence[int], num_steps: int) -> np.ndarray:
    """Greedy tokens of transformers, spread over SNAC's books, decoded at once."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_steps, do_sample=False, eos_token_id=ORPHEUS_STOP
    )[0, len(prompt) :]
    tokens = tokens[tokens != ORPHEUS_STOP]
    coarse, middle, fine = [], [], []
    for frame in range(len(tokens) // 7):
        codes = (tokens[7 * frame : 7 * frame + 7] - 48) % ORPHEUS_CODES
        coarse.append(codes[0])
        middle += [codes[1], codes[4]]
        fine += [codes[2], codes[3], codes[5], codes[6]]
    books = [torch.tensor(book).view(len(coarse), -1).T for book in (coarse, middle, fine)]
    with torch.inference_mode():
        codec = random_model("snac", torch.float32)
        return codec.decode(torch.cat(books)[None])[0].numpy()


@pytest.mark.parametrize("chunk_size", [(), (1,), (1, 3)])
def test_orpheus(orpheus_folder: Path, tmp_path: Path, chunk_size: tuple[int, ...]) -> None:
    config = config_of(tmp_path, chunk_size=chunk_size)
    others = (41, 7, 7, 42, 43)
    deltas = say(
        orpheus_folder,
        config,
        request(WORDS, others, max_steps=70, voice="tara"),
        request(others, max_steps=30, voice="zoe"),
    )
    expected = [
        (sound(deltas[0], 0), orpheus_pcm(orpheus_folder, WORDS, 70)),
        (sound(deltas[0], 1), orpheus_pcm(orpheus_folder, others, 70)),
        (sound(deltas[1], 0), orpheus_pcm(orpheus_folder, others, 30)),
    ]
    for ours, theirs in expected:
        assert len(theirs)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert deltas[0][-1].finish_reason in ("length", "loop")


@pytest.fixture(scope="module")
def csm_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("csm")
    return folder, csm(folder)


def csm_pcm(model: Any, num_frames: int, **inputs: torch.Tensor) -> np.ndarray:
    (audio,) = model.generate(
        **inputs,
        max_new_tokens=num_frames,
        do_sample=False,
        depth_decoder_do_sample=False,
        output_audio=True,
    )
    return audio.numpy()


def test_csm(csm_model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = csm_model
    words = (1, 5, 9, 30, 2)
    (deltas,) = say(folder, config_of(tmp_path), request(words, max_steps=9))
    expected = csm_pcm(model, 9, input_ids=torch.tensor([words]))
    np.testing.assert_allclose(sound(deltas), expected, atol=1e-5)
    assert deltas[-1].num_output_tokens == 9


def test_csm_in_the_voice_of_a_clip(csm_model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = csm_model
    words = (1, 5, 9, 30, 2)
    pcm_S = np.random.default_rng(2).normal(size=7 * 48).astype("<f4") * 0.3
    clip = VoiceClip(
        digest=hashlib.sha256(pcm_S.tobytes()).hexdigest(),
        pcm=pcm_S.tobytes(),
        sample_rate=model.codec_model.config.sampling_rate,
        prompt_ids=(1, 7, 2),
    )
    same = [request(words, max_steps=9, clip=clip)] * 2
    deltas = say(folder, config_of(tmp_path), *same)
    ids = [1, 7, 2, *[45] * 7, 46, *words]
    expected = csm_pcm(
        model,
        9,
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        input_values=torch.from_numpy(pcm_S)[None, None],
        input_values_cutoffs=torch.tensor([[len(pcm_S)]]),
    )
    for spoken in deltas:
        np.testing.assert_allclose(sound(spoken), expected, atol=1e-5)
    assert sum(spoken[-1].num_cached_tokens for spoken in deltas) > 0


def test_higgs(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = tmp_path_factory.mktemp("higgs")
    model, codec = higgs(folder)
    words = (1, 5, 9, 30, 8, 21, 4, 17, 50, 2, 52)
    (deltas,) = say(folder, config_of(tmp_path), request(words, max_steps=16))
    steps_NQ = model.generate(
        torch.tensor([words]), max_new_tokens=16, do_sample=False, attention_mask=torch.ones(1, 11)
    )[0]
    revert = transformers.HiggsAudioV2Processor.revert_delay_pattern
    codes_FQ = revert(None, steps_NQ[1:]).clip(0, 31)
    with torch.inference_mode():
        expected_S = codec.decode(codes_FQ.T[None]).audio_values[0, 0]
    assert len(expected_S)
    np.testing.assert_allclose(sound(deltas), expected_S.numpy(), atol=1e-5)


def test_csm_segment_is_prompted_with_the_previous_one(
    csm_model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, reference = csm_model
    first, second = (1, 5, 9, 30, 2), (1, 6, 6, 2)
    (deltas,) = say(folder, config_of(tmp_path), request(first, second, max_steps=6))
    spoken = reference.generate(
        torch.tensor([first]), max_new_tokens=6, do_sample=False, depth_decoder_do_sample=False
    )[0]
    frames = [tuple(codes) for codes in spoken.tolist()]
    with Checkpoint.open(folder) as checkpoint:
        blueprint = CsmBlueprint(checkpoint.config, setup_of(folder))
        model = blueprint.build(checkpoint, lambda _: None)
    rig = FrameRig(
        model,
        blueprint.kv_layout(4, torch.float32),
        recorder=partial(FrameRecorder, logits=model.head, vocab_size=32),
    )
    row = rig.open((*first, *frame_ids(frames), 46, *second), frames=frames)
    rig.prefill(row)
    rig.decode(row, num_steps=5)
    codes_1QF = torch.tensor(row.frames[-6:]).T[None]
    with torch.inference_mode():
        expected_S = reference.codec_model.decode(codes_1QF).audio_values[0, 0]
    np.testing.assert_allclose(sound(deltas, 1), expected_S.numpy(), atol=1e-5)


def test_codes_that_mimi_does_not_have_are_not_sampled(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    csm(folder, vocab_size=40)
    (deltas,) = say(folder, config_of(tmp_path), request((1, 5, 9, 30, 2), max_steps=40))
    assert deltas[-1].finish_reason in ("length", "loop", "stop")
    assert len(sound(deltas))
