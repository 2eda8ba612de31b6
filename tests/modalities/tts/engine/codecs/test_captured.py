"""Captured pushes: settled rows are replayed, and sound as they would without."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from support.captured import verified_steps
from support.codec_models import MODELS, random_model
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.modalities.tts.engine.codecs import StreamingDecoder, build_decoder

NUM_ROWS, NUM_CODES = 3, 32


def decoder_of(name: str, graphs: CapturedSteps | None) -> StreamingDecoder:
    torch.manual_seed(0)
    decoder = build_decoder(random_model(name, torch.float64), num_rows=NUM_ROWS)
    if graphs is not None:
        decoder.capture_with(graphs)
    return decoder


def listen(decoder: StreamingDecoder, seed: int) -> list[Tensor]:
    """What rows that come and go are pushed and given, in turns of one to three frames."""
    chance, heard = random.Random(seed), []
    source = torch.Generator().manual_seed(seed)
    num_codebooks = decoder._adapter.num_codebooks
    live: set[int] = set()
    for _ in range(70):
        row = chance.randrange(NUM_ROWS)
        if row not in live:
            decoder.init_state([row], seeds=[row])
            live.add(row)
        elif chance.random() < 0.03:
            heard.append(decoder.flush([row]).row(0).clone())
            live.remove(row)
        rows = chance.sample(sorted(live), chance.randint(0, len(live)))
        if not rows:
            continue
        num_frames = chance.choice((1, 1, 3))
        shape = (len(rows), num_codebooks, num_frames)
        codes_BQF = torch.randint(NUM_CODES, shape, generator=source)
        valid = [num_frames] * len(rows)
        if chance.random() < 0.2:
            valid[0] -= 1
        audio = decoder.push(codes_BQF, rows, valid)
        heard += [audio.row(index).clone() for index in range(len(rows))]
    return heard


@pytest.mark.parametrize("name", MODELS)
def test_captured_pushes_give_the_same_sound(name: str) -> None:
    steps, backend = verified_steps()
    captured, eager = decoder_of(name, steps), decoder_of(name, None)
    heard, wanted = listen(captured, 3), listen(eager, 3)
    assert backend.num_replays > 10
    assert len(heard) == len(wanted)
    for ours, theirs in zip(heard, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


def test_padding_has_a_row_of_its_own_in_the_state() -> None:
    steps, _ = verified_steps()
    decoder = decoder_of("mimi", None)
    before = decoder.state_bytes
    decoder.capture_with(steps)
    assert decoder.state_bytes * NUM_ROWS == before * (NUM_ROWS + 1)
