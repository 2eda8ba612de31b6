"""Samples of our CPU kernels, on each level of instructions: those of torch, number for number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.bound_rows import bound_row
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.sampling.sampler import Sampler

HISTORY = (0, 0, 3, 1)
"""Two tokens of a prompt, and two of an answer; they are in any vocabulary as remainders."""
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1000, top_p=0.999, min_p=0.001),
    SamplingParams(temperature=1.0, top_k=3000, top_p=0.95),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=0.6, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=0.7),
    SamplingParams(temperature=0.9, logit_bias=((0, 5.0),), repetition_penalty=1.1, top_p=0.8),
]


def sampler_of(vocab_size: int, native: NativeKernels | None) -> Sampler:
    sampler = Sampler(
        vocab_size=vocab_size,
        max_batch_size=len(PARAMS),
        device=torch.device("cpu"),
        native=native,
    )
    history = tuple(token % vocab_size for token in HISTORY)
    for slot, params in enumerate(PARAMS):
        sampler.bind(bound_row(slot, params, history[:2], history[2:]))
    return sampler


def logits_of(seed: int, vocab_size: int, scale: float, digits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(PARAMS), vocab_size, generator=generator) * scale
    return logits.round(decimals=digits)


def masks_of(seed: int, vocab_size: int) -> list[bytes]:
    """For every other row, of a third of the tokens, the first of them included."""
    generator = np.random.default_rng(seed)
    masks = []
    for row in range(len(PARAMS)):
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[:vocab_size] = generator.random(vocab_size) < 1 / 3
        bits[0] = 1
        masks.append(np.packbits(bits, bitorder="little").tobytes() if row % 2 else b"")
    return masks


@pytest.mark.parametrize(
    ("vocab_size", "scale", "digits"),
    [
        (1, 3.0, 7),
        (17, 3.0, 1),
        (300, 3.0, 7),
        (5003, 3.0, 7),
        (5003, 3.0, 0),  # few values: many tokens share the last that is kept
        (5003, 0.2, 7),  # no token is much lighter than another
        (5003, 60.0, 7),
    ],
)
def test_samples_are_those_of_torch(
    kernels: NativeKernels, vocab_size: int, scale: float, digits: int
) -> None:
    ours, theirs = (sampler_of(vocab_size, native) for native in (kernels, None))
    slots = torch.randperm(len(PARAMS), generator=torch.Generator().manual_seed(1)).tolist()
    for step in range(12):
        logits = logits_of(step, vocab_size, scale, digits)
        masks = masks_of(step, vocab_size) if step % 2 else ()
        positions = [len(HISTORY) + step] * len(PARAMS)
        found, expected = (
            sampler.sample(logits, slots, positions, masks) for sampler in (ours, theirs)
        )
        assert found.to_results() == expected.to_results()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_harms_no_other(kernels: NativeKernels, broken: float) -> None:
    slots, positions = range(len(PARAMS)), [9] * len(PARAMS)
    logits = logits_of(2, 500, 3.0, 7)
    whole = sampler_of(500, kernels).sample(logits, slots, positions).to_results()
    for bad in slots:
        damaged = logits.clone()
        damaged[bad, 499] = broken
        found = sampler_of(500, kernels).sample(damaged, slots, positions)
        assert 0 <= found.token_ids_B[bad] < 500
        for row, result in enumerate(found.to_results()):
            assert result == whole[row] if row != bad else not result.is_finite


def test_the_ends_of_the_mass_fall_on_tokens_that_have_some(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.full((len(PARAMS), 5003), -1e30)
    logits[:, [17, 4001]] = 0.0
    for uniform, token in ((0.0, 17), (1 - 2.0**-52, 4001)):
        monkeypatch.setattr(
            "triptych.core.runtime.sampling.sampler.uniforms",
            lambda keys, positions, uniform=uniform: np.full(len(keys), uniform),
        )
        found = sampler_of(5003, kernels).sample(logits[1:9], range(1, 9), [4] * 8)
        assert found.token_ids_B.tolist() == [token] * 8
