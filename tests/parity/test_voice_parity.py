"""The embedded voice on pages, step by step, against whole sequences through transformers' Llama.

The reference is given the codes and the walk that ours said, as in training, and must score each
step alike; it knows nothing of pages, chunks or batches.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from support.decoder_rig import Row
from support.frame_rig import FrameRecorder, FrameRig
from support.speech_models import setup_of
from support.voice_model import ACOUSTIC, CODEC, ReferenceAcousticModel, save_voice
from triptych.core.engine_api.frames import END_FRAME_ID
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.models.voice.acoustic import (
    AcousticModel,
    AcousticPositions,
    Kind,
    windows,
)
from triptych.modalities.tts.engine.models.voice.blueprint import VoiceBlueprint

START = ACOUSTIC.num_symbols
SENTENCES = ((0, 3, 7, 7, 1, 12, 19, 4, 0), (0, 5, 0), (0, 9, 2, 2, 17, 11, 0), (0, 8, 14, 6, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voice")


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceAcousticModel:
    return save_voice(folder)[0]


@pytest.fixture
def model(folder: Path, reference: ReferenceAcousticModel) -> AcousticModel:
    with Checkpoint.open(folder) as checkpoint:
        blueprint = VoiceBlueprint(checkpoint.config, setup_of(folder))
        return blueprint.build(checkpoint, lambda _: None)


@pytest.fixture
def rig(model: AcousticModel) -> FrameRig:
    layout = model.stack.config.kv_layout(4, torch.float32)
    logits = model.io["output"].scores
    recorder = partial(FrameRecorder, logits=logits, vocab_size=CODEC.num_levels)
    return FrameRig(model, layout, recorder=recorder)


def say(rig: FrameRig, *rows: Row) -> None:
    """To the end of each."""
    live = list(rows)
    while live:
        rig.decode(*live)
        live = [row for row in live if row.tokens[-1] != END_FRAME_ID]
        assert max(map(len, (row.tokens for row in rows))) < 80, "a walk must end"


def expected(
    reference: ReferenceAcousticModel, symbols: tuple[int, ...], row: Row
) -> tuple[torch.Tensor, int]:
    """Scores of every step, given ours; and how many symbols are spoken after the last."""
    num_symbols, num_steps = len(symbols), len(row.frames)
    length = num_symbols + num_steps
    edge = [START] * (ACOUSTIC.num_symbols_before + 1), [START] * (ACOUSTIC.num_symbols_after + 1)
    padded = torch.tensor([[*edge[0][1:], *symbols, *edge[1]]])
    due, held = torch.zeros(1, length, dtype=torch.long), torch.zeros(1, length, dtype=torch.long)
    due[0, :num_symbols] = torch.arange(num_symbols)
    kinds = torch.tensor([[Kind.SYMBOL] * num_symbols + [Kind.STEP] * num_steps])
    kinds[0, num_symbols] = Kind.START
    values = torch.zeros(1, length, CODEC.num_codebooks)
    codes = torch.tensor(row.frames[:-1]).view(num_steps - 1, CODEC.num_codebooks)
    values[0, num_symbols + 1 :] = codes / 2 - 1  # five levels
    for step in range(num_steps):
        at = num_symbols + step
        positions = AcousticPositions(windows(padded, due, ACOUSTIC), held, values, kinds)
        with torch.inference_mode():
            states = reference.stack(inputs_embeds=reference.input(positions)).last_hidden_state
            scores = reference.output.scores(states[0, num_symbols:])
            advance = reference.output(states[0, at]).advance
        least = int(held[0, at] >= ACOUSTIC.max_held)
        moved = least + int(advance[least:].argmax())
        spoken = min(int(due[0, at]) + moved, num_symbols)
        if step + 1 < num_steps:
            due[0, at + 1] = spoken
            held[0, at + 1] = 0 if moved else held[0, at] + 1
    return scores, spoken


def assert_equal(reference: ReferenceAcousticModel, symbols: tuple[int, ...], row: Row) -> None:
    scores, spoken = expected(reference, symbols, row)
    ours = torch.stack([row.logits[position] for position in sorted(row.logits)])
    torch.testing.assert_close(ours[: len(scores)], scores, atol=1e-4, rtol=0)
    assert spoken == len(symbols)
    codes = scores[:, : -(ACOUSTIC.max_advance + 1)].view(-1, CODEC.num_codebooks, CODEC.num_levels)
    assert codes.argmax(-1).tolist() == [list(frame) for frame in row.frames]


def test_steps_on_pages_equal_whole_sequences(
    rig: FrameRig, reference: ReferenceAcousticModel
) -> None:
    row = rig.open((*SENTENCES[0], START))
    rig.prefill(row)
    say(rig, row)
    assert_equal(reference, SENTENCES[0], row)


def test_prompts_may_come_in_chunks(rig: FrameRig, reference: ReferenceAcousticModel) -> None:
    row = rig.open((*SENTENCES[0], START))
    for count in (2, 5, 3):
        rig.step((row, count))
    say(rig, row)
    assert_equal(reference, SENTENCES[0], row)


def test_rows_do_not_touch_each_other(rig: FrameRig, reference: ReferenceAcousticModel) -> None:
    rows = [rig.open((*symbols, START)) for symbols in SENTENCES]
    rig.prefill(rows[0], rows[1])
    rig.decode(rows[0], rows[1])
    rig.step((rows[0], 0), (rows[1], 0), (rows[2], len(rows[2].tokens)))
    rig.step((rows[2], 0), (rows[3], len(rows[3].tokens)))
    say(rig, *rows)
    for symbols, row in zip(SENTENCES, rows, strict=True):
        assert_equal(reference, symbols, row)


def test_a_slot_forgets_the_sentence_before(
    rig: FrameRig, reference: ReferenceAcousticModel
) -> None:
    first = rig.open((*SENTENCES[0], START))
    rig.prefill(first)
    say(rig, first)
    rig.free_slots.append(first.slot)
    second = rig.open((*SENTENCES[1], START))
    assert second.slot == first.slot
    rig.prefill(second)
    say(rig, second)
    assert_equal(reference, SENTENCES[1], second)


def test_steps_of_which_nothing_came_are_computed_again(
    rig: FrameRig, reference: ReferenceAcousticModel
) -> None:
    rows = [rig.open((*symbols, START)) for symbols in SENTENCES[:2]]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=2)
    for num_lost in (1, 2):
        known = [(row.num_cached, len(row.tokens), len(row.frames)) for row in rows]
        rig.decode(*rows, num_steps=num_lost)
        for row, (num_cached, num_tokens, num_frames) in zip(rows, known, strict=True):
            del row.tokens[num_tokens:], row.frames[num_frames:]
            row.num_cached, row.num_bound_pages, row.is_bound = num_cached, 0, False
        rig.prefill(*rows)  # what was sampled last goes in again
    say(rig, *rows)
    for symbols, row in zip(SENTENCES, rows, strict=False):
        assert_equal(reference, symbols, row)


def test_a_symbol_is_held_no_longer_than_the_bound(rig: FrameRig, model: AcousticModel) -> None:
    with torch.no_grad():
        output = model.io["output"]
        output.scores.weight[-3:] = 0
        output.scores.bias[-3:] = torch.tensor([9.0, 0.0, -9.0])  # would never go on
    row = rig.open((*SENTENCES[1], START))
    rig.prefill(row)
    say(rig, row)
    assert len(row.frames) == len(SENTENCES[1]) * (ACOUSTIC.max_held + 1)
