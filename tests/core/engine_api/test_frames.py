"""Ids of frames, and the drawing of a whole frame's codes."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.bound_rows import bound_row
from triptych.core.engine_api.frames import END_FRAME_ID, FIRST_FRAME_ID, frame_id
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.sampling.sampler import FrameSampler, Sampler

CPU = torch.device("cpu")
NUM_CODES, SIZE = 3, 20


@given(st.lists(st.lists(st.integers(0, 4095), min_size=2, max_size=2), max_size=20))
def test_an_id_is_its_codes_alone(frames: list[list[int]]) -> None:
    ids = {tuple(codes): frame_id(codes) for codes in frames}
    assert len(set(ids.values())) == len(ids)
    for codes, token_id in ids.items():
        assert frame_id(list(codes)) == token_id
        assert FIRST_FRAME_ID < token_id < 2**63
        assert token_id != END_FRAME_ID
        struct.pack("<q", token_id)  # as the keys of pages do


def sampler(*rows: SamplingParams) -> Sampler:
    made = Sampler(vocab_size=SIZE, max_batch_size=8, device=CPU)
    for slot, sampling in enumerate(rows):
        made.bind(bound_row(slot, sampling, (1,)))
    return made


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(3, NUM_CODES, SIZE, generator=torch.Generator().manual_seed(seed))


ROWS = (
    SamplingParams(seed=1, temperature=1.3, top_k=5),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1, temperature=0.8, top_p=0.7, min_p=0.05),
)


def one_by_one(frame: FrameSampler, logits_BQV: torch.Tensor) -> torch.Tensor:
    codes = [frame.sample(logits_BV, at) for at, logits_BV in enumerate(logits_BQV.unbind(1))]
    return torch.stack(codes, 1)


def test_all_codes_at_once_are_those_drawn_one_by_one() -> None:
    drawn, made = [], sampler(*ROWS)
    for position in range(20):
        logits_BQV = logits_of(position)
        frame = made.frame_sampler([0, 1, 2], [position] * 3, NUM_CODES)
        codes_BQ = frame.sample_all(logits_BQV)
        torch.testing.assert_close(codes_BQ, one_by_one(frame, logits_BQV))
        torch.testing.assert_close(codes_BQ[1], logits_BQV[1].argmax(-1))
        drawn.append(codes_BQ[0].tolist())
        alone = made.frame_sampler([2], [position], NUM_CODES).sample_all(logits_BQV[2:])
        torch.testing.assert_close(alone[0], codes_BQ[2])
    assert len({tuple(codes) for codes in drawn}) > 15


def test_no_two_codes_share_their_randomness() -> None:
    """Equal logits at every code and position: what is drawn differs as chance has it."""
    made, flat_1QV = sampler(ROWS[0]), torch.zeros(1, NUM_CODES, SIZE)
    drawn = [
        made.frame_sampler([0], [position], NUM_CODES).sample_all(flat_1QV)[0].tolist()
        for position in range(200)
    ]
    counts = np.bincount(np.array(drawn).ravel(), minlength=SIZE)
    assert counts.min() > 0
    pairs = {pair for codes in drawn for pair in pairwise(codes)}
    assert len(pairs) > 150


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_of_no_finite_logits_is_marked(bad: float) -> None:
    logits_BQV = logits_of(0)
    logits_BQV[1, 2, 7] = bad
    made = sampler(*ROWS)
    frame = made.frame_sampler([0, 1, 2], [4, 4, 4], NUM_CODES)
    frame.sample_all(logits_BQV)
    assert frame.is_finite_B.tolist() == [True, False, True]
    frame = made.frame_sampler([0, 1, 2], [4, 4, 4], NUM_CODES)
    one_by_one(frame, logits_BQV)
    assert frame.is_finite_B.tolist() == [True, False, True]
