"""Higgs Audio V2 on our decoder and paged cache against transformers: greedy codes and logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from support.decoder_rig import Row
from support.frame_rig import FrameRecorder, FrameRig, frame_ids
from support.speech_models import higgs, setup_of
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.models.higgs import HiggsBlueprint, HiggsModel

NUM_STEPS = 30
BEGIN, END = 32, 33
WORDS = (1, 5, 9, 30, 8, 21, 4, 17, 50, 2, 52)  # transformers wants as many as codebooks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("higgs")
    higgs(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def blueprint(folder: Path) -> HiggsBlueprint:
    with Checkpoint.open(folder) as checkpoint:
        return HiggsBlueprint(checkpoint.config, setup_of(folder))


@pytest.fixture(scope="module")
def model(folder: Path, blueprint: HiggsBlueprint) -> HiggsModel:
    with Checkpoint.open(folder) as checkpoint:
        return blueprint.build(checkpoint, lambda _: None)


@pytest.fixture
def rig(model: HiggsModel) -> FrameRig:
    layout = model.words.config.kv_layout(4, torch.float32)
    recorder = partial(FrameRecorder, logits=model.head, vocab_size=34)
    return FrameRig(model, layout, recorder=recorder)


def generate(reference: Any, ids: tuple[int, ...], **inputs: torch.Tensor) -> Any:
    """Greedy steps after the prompt's own, and the logits before each."""
    output = reference.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        **inputs,
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    num_given = inputs["audio_input_ids"].shape[1] if inputs else 0
    return output.audio_sequences[0, num_given:].tolist(), torch.cat(output.logits)


def assert_equal(row: Row, expected: tuple[list[list[int]], torch.Tensor]) -> None:
    """Up to a step of end marks alone, which has no codes here."""
    steps, logits_NV = expected
    sampled = row.tokens[row.num_prompt_tokens :]
    if all(code == END for code in steps[-1]):
        assert sampled[len(steps) - 1] == END_FRAME_ID
        steps = steps[:-1]
    assert sampled[: len(steps)] == frame_ids(steps)
    ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
    num_logits = len(logits_NV)
    torch.testing.assert_close(ours_NV[:num_logits], logits_NV, atol=1e-4, rtol=0)


def test_words_alone(rig: FrameRig, reference: Any) -> None:
    row = rig.open(WORDS)
    rig.prefill(row)
    rig.decode(row, num_steps=NUM_STEPS - 1)
    assert_equal(row, generate(reference, WORDS))


def voice_context(
    blueprint: HiggsBlueprint,
) -> tuple[tuple[int, ...], list[tuple[int, ...]], dict[str, torch.Tensor]]:
    """A prompt with six frames of sound in it: its ids for transformers, its steps, its inputs."""
    codes_QF = np.random.default_rng(1).integers(0, 32, (10, 6))
    steps_NQ = blueprint.steps(codes_QF)
    ids = (1, 7, 52, *[51] * (len(steps_NQ) - 9), *[53] * 9, 54, 50, *WORDS)
    inputs = {
        "audio_input_ids": torch.from_numpy(steps_NQ)[None],
        "audio_input_ids_mask": torch.ones(1, len(steps_NQ), dtype=torch.bool),
    }
    return ids, [tuple(codes) for codes in steps_NQ.tolist()], inputs


def open_with_voice(rig: FrameRig, steps: list[tuple[int, ...]], words: tuple[int, ...]) -> Row:
    return rig.open((1, 7, 52, *frame_ids(steps), 54, 50, *words), frames=steps)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_voice_before_the_words_in_chunks(
    rig: FrameRig, reference: Any, blueprint: HiggsBlueprint, chunk: int
) -> None:
    ids, steps, inputs = voice_context(blueprint)
    row = open_with_voice(rig, steps, WORDS)
    while row.num_cached < row.num_prompt_tokens:
        rig.step((row, min(chunk, row.num_prompt_tokens - row.num_cached)))
    rig.decode(row, num_steps=NUM_STEPS - 1)
    assert_equal(row, generate(reference, ids, **inputs))


def test_rows_of_every_kind_in_one_batch_and_a_cached_voice(
    rig: FrameRig, reference: Any, blueprint: HiggsBlueprint
) -> None:
    ids, steps, inputs = voice_context(blueprint)
    plain, first = rig.open(WORDS), open_with_voice(rig, steps, (3,))
    rig.prefill(plain)
    rig.step((plain, 0), (first, 9))
    rig.step((plain, 0), (first, len(first.tokens) - 9))
    voiced = open_with_voice(rig, steps, WORDS)
    rig.share(voiced, first, num_pages=4)
    rig.step((plain, 0), (first, 0), (voiced, len(voiced.tokens) - voiced.num_cached))
    rig.decode(plain, voiced, num_steps=NUM_STEPS - 4)
    rig.decode(voiced, num_steps=3)
    assert_equal(plain, generate(reference, WORDS))
    assert_equal(voiced, generate(reference, ids, **inputs))


@pytest.fixture(scope="module")
def ending(reference: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that says the mark of the end in place of a code it says late, theirs and ours."""
    model = type(reference).from_pretrained(folder).eval()
    codes_of_first = [codes[0] for codes in generate(reference, WORDS)[0]]
    late = next(
        code
        for at, code in enumerate(codes_of_first)
        if at >= 8 and codes_of_first.index(code) == at
    )
    assert codes_of_first.index(late) + 10 < NUM_STEPS
    with torch.no_grad():
        head_QVC = model.audio_lm_head.weight.view(10, 34, -1)
        head_QVC[0, END] = 1.05 * head_QVC[0, late]
    saved = tmp_path_factory.mktemp("ending")
    model.save_pretrained(saved)
    with Checkpoint.open(saved) as checkpoint:
        ours = HiggsBlueprint(checkpoint.config, setup_of(folder)).build(checkpoint, lambda _: None)
    return model, ours


@pytest.mark.parametrize("num_before", [0, 12, 16])
def test_the_end_comes_down_the_codebooks_even_of_a_row_computed_again(
    rig: FrameRig, ending: Any, num_before: int
) -> None:
    reference, ours = ending
    recorder = partial(FrameRecorder, logits=ours.head, vocab_size=34)
    rig = FrameRig(ours, rig.kv.layout, recorder=recorder)
    row = rig.open(WORDS)
    rig.prefill(row)
    if num_before:
        rig.decode(row, num_steps=num_before)
        rig.preempt(row)
        rig.prefill(row)
    rig.decode(row, num_steps=NUM_STEPS - 2 - num_before)
    expected = generate(reference, WORDS)
    assert expected[0][-1] == [END] * 10, "transformers came to an end"
    assert len(expected[0]) < NUM_STEPS
    assert_equal(row, expected)


def test_steps_become_the_frames_that_transformers_decodes(blueprint: HiggsBlueprint) -> None:
    steps_NQ = np.random.default_rng(3).integers(0, 32, (25, 10))
    steps_NQ[0] = BEGIN
    steps_NQ[-3:, 0] = END
    revert = transformers.HiggsAudioV2Processor.revert_delay_pattern
    expected_FQ = revert(None, torch.from_numpy(steps_NQ[1:])).clip(0, BEGIN - 1)
    np.testing.assert_array_equal(blueprint.frames(steps_NQ), expected_FQ.T.numpy())
    assert blueprint.traits.num_frames(25) == len(expected_FQ)


def test_a_voice_is_delayed_as_transformers_does(blueprint: HiggsBlueprint) -> None:
    codes_QF = np.random.default_rng(3).integers(0, 32, (10, 6))
    stream = np.pad(codes_QF, ((0, 0), (1, 1)))
    stream[:, 0], stream[:, -1] = BEGIN, END

    class Marks:
        audio_stream_bos_id, audio_stream_eos_id = BEGIN, END

    build = transformers.HiggsAudioV2Processor.build_delay_pattern
    expected_1QN = build(Marks, torch.from_numpy(stream)[None])
    np.testing.assert_array_equal(blueprint.steps(codes_QF), expected_1QN[0].T.numpy())
