"""CSM on our decoder and paged cache against transformers: backbone logits and greedy codes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.decoder_rig import Row
from support.frame_rig import FrameRecorder, FrameRig, frame_ids
from support.speech_models import csm, setup_of
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.layers.attention import KvCache
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.frame_head import FrameInputs, FrameSamples
from triptych.modalities.tts.engine.models.csm import CsmBlueprint, CsmModel

Reference = transformers.CsmForConditionalGeneration
NUM_FRAMES = 9
WORDS = (1, 5, 9, 30, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("csm")
    csm(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> CsmModel:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = CsmBlueprint(checkpoint.config, setup_of(folder))
        return blueprint.build(checkpoint, lambda _: None)


@pytest.fixture
def rig(model: CsmModel) -> FrameRig:
    layout = model.backbone.config.kv_layout(4, torch.float32)
    recorder = partial(FrameRecorder, logits=model.head, vocab_size=32)
    return FrameRig(model, layout, recorder=recorder)


def generate(reference: Reference, **inputs: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy frames and the backbone's logits before each."""
    output = reference.generate(
        **inputs,
        max_new_tokens=NUM_FRAMES,
        do_sample=False,
        depth_decoder_do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0].tolist(), torch.cat(output.logits)


def assert_equal(row: Row, expected: tuple[list[list[int]], torch.Tensor]) -> None:
    frames, logits_NV = expected
    mine = row.frames[-len(frames) :]
    assert [list(codes) for codes in mine] == frames
    assert row.tokens[row.num_prompt_tokens :] == frame_ids(frames)
    ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
    torch.testing.assert_close(ours_NV, logits_NV, atol=1e-4, rtol=0)


def test_words_alone(rig: FrameRig, reference: Reference) -> None:
    row = rig.open(WORDS)
    rig.prefill(row)
    rig.decode(row, num_steps=NUM_FRAMES - 1)
    assert_equal(row, generate(reference, input_ids=torch.tensor([WORDS])))


def voice_context(reference: Reference) -> tuple[dict[str, torch.Tensor], list[tuple[int, ...]]]:
    """A clip between words of its own and those to be said, and the clip's frames."""
    config = reference.config
    pcm_11S = torch.randn(1, 1, 7 * 48, generator=torch.Generator().manual_seed(2)) * 0.3
    with torch.inference_mode():
        codes_QF = reference.codec_model.encode(pcm_11S).audio_codes[0]
    num_frames = codes_QF.shape[1]
    ids = [1, 7, 2, *[config.audio_token_id] * num_frames, config.audio_eos_token_id, *WORDS]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids)),  # the id of sound is that of padding
        "input_values": pcm_11S,
        "input_values_cutoffs": torch.tensor([[pcm_11S.shape[-1]]]),
    }
    return inputs, [tuple(codes) for codes in codes_QF.T.tolist()]


def open_with_voice(rig: FrameRig, frames: list[tuple[int, ...]], words: tuple[int, ...]) -> Row:
    return rig.open((1, 7, 2, *frame_ids(frames), 46, *words), frames=frames)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_voice_before_the_words_in_chunks(
    rig: FrameRig, reference: Reference, chunk: int
) -> None:
    inputs, frames = voice_context(reference)
    row = open_with_voice(rig, frames, WORDS)
    while row.num_cached < row.num_prompt_tokens:
        rig.step((row, min(chunk, row.num_prompt_tokens - row.num_cached)))
    rig.decode(row, num_steps=NUM_FRAMES - 1)
    assert_equal(row, generate(reference, **inputs))


def test_a_voice_that_is_cached(rig: FrameRig, reference: Reference) -> None:
    inputs, frames = voice_context(reference)
    first, second = open_with_voice(rig, frames, (3,)), open_with_voice(rig, frames, WORDS)
    rig.prefill(first)
    rig.share(second, first, num_pages=2)
    rig.prefill(second)
    rig.decode(first, second, num_steps=NUM_FRAMES - 1)
    assert_equal(second, generate(reference, **inputs))


def test_rows_of_every_kind_in_one_batch(rig: FrameRig, reference: Reference) -> None:
    inputs, frames = voice_context(reference)
    plain, voiced = rig.open(WORDS), open_with_voice(rig, frames, WORDS)
    rig.prefill(plain)
    rig.step((plain, 0), (voiced, 5))
    rig.step((plain, 0), (voiced, len(voiced.tokens) - 5))
    rig.decode(plain, voiced, num_steps=NUM_FRAMES - 3)
    rig.decode(voiced, num_steps=2)
    assert_equal(plain, generate(reference, input_ids=torch.tensor([WORDS])))
    assert_equal(voiced, generate(reference, **inputs))


def test_a_row_computed_again_goes_on_from_its_frames(rig: FrameRig, reference: Reference) -> None:
    row = rig.open(WORDS)
    rig.prefill(row)
    rig.decode(row, num_steps=3)
    rig.preempt(row)
    rig.prefill(row)
    rig.decode(row, num_steps=NUM_FRAMES - 5)
    assert_equal(row, generate(reference, input_ids=torch.tensor([WORDS])))


def test_random_frames_are_a_rows_own(rig: FrameRig) -> None:
    def speak(seed: int, *others: int) -> list[tuple[int, ...]]:
        rows = [rig.open(WORDS, SamplingParams(seed=s, top_k=9)) for s in (seed, *others)]
        rig.prefill(*rows)
        rig.decode(*rows, num_steps=4)
        rig.free_slots += [row.slot for row in rows]
        return rows[0].frames

    alone = speak(1)
    assert speak(1, 2, 3) == alone
    assert speak(2) != alone
    assert len({code for codes in alone for code in codes}) > 4


def test_speech_ends_with_a_frame_of_end_codes(rig: FrameRig, model: CsmModel) -> None:
    """Transformers looks at all codes but the last."""
    ends = [[0, 0, 0, 0], [0, 0, 0, 5], [0, 0, 4, 0], [3, 0, 0, 0]]
    samples = iter(torch.tensor(ends))

    class Script(FrameRecorder):
        def sample(self, *args: Any) -> FrameSamples:
            sampled = super().sample(*args)
            codes_1Q = next(samples)[None]
            return replace(sampled, codes_RQ=codes_1Q, is_end_R=model.is_end(codes_1Q))

    script = partial(Script, logits=model.head, vocab_size=32)
    rig = FrameRig(model, rig.kv.layout, recorder=script)
    row = rig.open(WORDS)
    rig.prefill(row)
    rig.decode(row, num_steps=3)
    sampled = row.tokens[len(WORDS) :]
    assert [token_id == END_FRAME_ID for token_id in sampled] == [True, True, False, False]


def test_nan_row_is_flagged(rig: FrameRig, model: CsmModel) -> None:
    class Poison(FrameRecorder):
        def forward(self, inputs: FrameInputs, kv: KvCache) -> torch.Tensor:
            hidden_TC = super().forward(inputs, kv)
            hidden_TC[inputs.slots_T == sick.slot] = torch.nan
            return hidden_TC

    poison = partial(Poison, logits=model.head, vocab_size=32)
    rig = FrameRig(model, rig.kv.layout, recorder=poison)
    sick, sound = rig.open(WORDS), rig.open(WORDS)
    result = rig.step((sick, len(WORDS)), (sound, len(WORDS)))
    assert [row.is_finite for row in result.rows] == [False, True]
