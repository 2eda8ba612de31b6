from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from triptych.core.runtime.sampling.filters import nucleus_thresholds, sample, total_mass

VOCAB_SIZES = (100, 8193, 49152, 151936)


def random_logits(seed: int, num_rows: int, vocab_size: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    probs = logits.softmax(-1)
    num_rows = len(logits)
    thresholds = nucleus_thresholds(
        probs, torch.full((num_rows,), top_k), torch.full((num_rows,), top_p)
    )
    return probs >= thresholds[:, None]


def kept_by_transformers(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    scores = logits.double()
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.isfinite()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from((2, 100, 129, 3000)),
    scale=st.sampled_from((0.1, 2.0, 6.0)),
    top_k=st.sampled_from((0, 2, 50, 128, 129, 2500, 10**6)),
    top_p=st.sampled_from((0.01, 0.3, 0.9, 0.999, 1.0)),
)
def test_keeps_what_transformers_keeps(
    seed: int, vocab_size: int, scale: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(seed, 3, vocab_size, scale)
    ours, theirs = kept(logits, top_k, top_p), kept_by_transformers(logits, top_k, top_p)
    # Rounding may move the end of a nucleus by a token, or by tokens of one probability.
    differing = torch.where(ours != theirs, logits.double().softmax(-1), 0.0)
    assert differing.sum() < 2e-3 * differing.count_nonzero().clamp(min=1)
    assert (ours != theirs).sum() <= 3


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 1.0), (0, 0.9), (1000, 0.5), (4000, 0.99)])
def test_keeps_the_same_in_flat_and_peaked_rows(vocab_size: int, top_k: int, top_p: float) -> None:
    logits = torch.cat([random_logits(7, 1, vocab_size, scale) for scale in (1.0, 4.0, 12.0)])
    together = kept(logits, top_k, top_p)
    for row in range(3):
        theirs = kept_by_transformers(logits[row : row + 1], top_k, top_p)[0]
        assert (together[row] != theirs).sum() <= 1
        assert torch.equal(together[row], kept(logits[row : row + 1], top_k, top_p)[0])


def test_equal_tokens_are_kept_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])
    assert kept(logits, 2, 1.0).tolist() == [[False, True, True, True, False]]
    assert kept(logits, 0, 0.1).tolist() == [[False, True, True, True, False]]
    flat = torch.zeros(1, 5000)
    assert kept(flat, 40, 0.5).all()


def test_top_k_above_the_vocabulary_leaves_top_p_in_force() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert kept(logits, 3, 0.5).tolist() == kept(logits, 0, 0.5).tolist() == [[False, True, False]]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from((1, 100, 256, 257, 8193)),
    uniform=st.one_of(st.floats(0, 1 - 2.0**-52), st.sampled_from((0.0, 1 - 2.0**-52))),
)
def test_sample_inverts_the_running_sum(seed: int, vocab_size: int, uniform: float) -> None:
    probs = random_logits(seed, 2, vocab_size, 3.0).softmax(-1)
    probs[:, ::3] = 0 if vocab_size > 1 else 1
    tokens = sample(probs, torch.full((2,), uniform, dtype=torch.float64))
    for row, token in enumerate(tokens.tolist()):
        ends = np.cumsum(probs[row].double().numpy())
        target = uniform * ends[-1]
        assert probs[row, token] > 0
        assert ends[token] - probs[row, token].item() - 1e-6 <= target <= ends[token] + 1e-6


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_sample_reaches_both_ends(vocab_size: int) -> None:
    probs = torch.zeros(2, vocab_size)
    probs[0, 0] = probs[1, -1] = 1e-30
    for uniform in (0.0, 0.5, 1 - 2.0**-52):
        uniforms = torch.full((2,), uniform, dtype=torch.float64)
        assert sample(probs, uniforms).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("vocab_size", [2, 255, *VOCAB_SIZES])
def test_the_mass_of_a_row_is_bitwise_the_same_alone(
    vocab_size: int, set_threads: Callable[[int], None]
) -> None:
    probs = random_logits(0, 96, vocab_size, 3.0).softmax(-1)
    set_threads(1)
    together = total_mass(probs)
    set_threads(3)
    alone = torch.cat([total_mass(row) for row in probs.split(1)])
    assert torch.equal(together, alone)
