"""Sampled tokens: those of the sampler on a CPU, number for number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bound_rows import bound_row
from support.kernel_device import on_device
from support.tiers import nightly
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.kernels.triton import sampling as kernel
from triptych.core.runtime.sampling.filters import nucleus_thresholds, sample
from triptych.core.runtime.sampling.randomness import stream_key, uniforms
from triptych.core.runtime.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN
]
launch = on_device(kernel.launch)
CPU = torch.device("cpu")
GREEDY = (1.0, 1.0, 1.0, 0.0)


def logits_of(seed: int, num_rows: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_tokens(
    logits: torch.Tensor,
    shape: Sequence[float],
    numbers: Sequence[float] | torch.Tensor,
    *,
    edited: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[list[int], list[bool]]:
    """All rows of one shape: temperature, top-k, top-p, min-p."""
    num_rows = len(logits)
    shape_S4 = torch.tensor([shape] * num_rows)
    uniform = torch.as_tensor(numbers, dtype=torch.float64)
    ids, is_finite = launch(logits, edited, allowed, shape_S4, torch.arange(num_rows), uniform)
    return ids.tolist(), is_finite.tolist()


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1000, top_p=0.999, min_p=0.001),
    SamplingParams(temperature=1.0, top_k=3000, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.0),
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "scale"),
    [
        (2, torch.float32, 3.0),
        (100, torch.bfloat16, 3.0),
        nightly(5003, torch.float32, 3.0),
        (5003, torch.float32, 0.2),  # more are left to decide about than there is room for
    ],
)
def test_equals_the_sampler(vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    sampler = Sampler(vocab_size=vocab_size, max_batch_size=len(PARAMS), device=CPU)
    for slot, sampling in enumerate(PARAMS):
        sampler.bind(bound_row(slot, sampling))
    slots = torch.randperm(len(PARAMS), generator=torch.Generator().manual_seed(5))
    params = [PARAMS[slot] for slot in slots.tolist()]
    keys = np.array([stream_key(each.seed, each.sample_index) for each in params], np.uint64)
    logits = logits_of(1, len(PARAMS), vocab_size, scale).to(dtype)
    positions = np.arange(len(PARAMS))
    numbers = torch.from_numpy(uniforms(keys, positions))
    found, is_finite = launch(logits, None, None, sampler._shape_S4, slots, numbers)
    expected = sampler.sample(logits, slots.tolist(), positions.tolist())
    assert found.tolist() == expected.token_ids_B.tolist()
    assert is_finite.all()


@settings(max_examples=15, deadline=None)
@given(
    vocab_size=st.sampled_from([3, 2047, 2049, 6000]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    shape=st.tuples(
        st.sampled_from([0.3, 1.0, 2.0]),
        st.sampled_from([0.0, 1.0, 2.0, 40.0, 2500.0]),
        st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
        st.sampled_from([0.0, 0.02]),
    ),
    number=st.floats(0, 1 - 2.0**-52),
)
def test_any_filters_keep_the_tokens_of_the_reference(
    vocab_size: int, scale: float, shape: tuple[float, float, float, float], number: float
) -> None:
    """Few distinct logits, so that ties lie on every edge."""
    logits = logits_of(8, 2, vocab_size, scale).round(decimals=1)
    temperature, top_k, top_p, min_p = shape
    if top_k == 1:
        expected = logits.argmax(-1)
    else:
        probs = (logits / temperature).softmax(-1)
        least = nucleus_thresholds(probs, torch.full((2,), top_k), torch.full((2,), top_p))
        least = torch.maximum(least, min_p * probs.amax(-1))
        kept = torch.where(probs >= least[:, None], probs, 0.0)
        expected = sample(kept, torch.full((2,), number, dtype=torch.float64))
    found = sample_tokens(logits, shape, [number] * 2)[0]
    for row, (token, wanted) in enumerate(zip(found, expected.tolist(), strict=True)):
        # The last bit of a probability may move a share's end by as much, but keeps no other token.
        if token != wanted:
            ends = kept[row].double().cumsum(0) / kept[row].double().sum()
            assert kept[row, token] > 0
            assert abs(float(ends[min(token, wanted)]) - number) < 1e-6


def test_ties_are_kept_or_dropped_together() -> None:
    # Probabilities 0.4, 0.2, 0.2, 0.2: whatever ends in the middle of the ties takes all of them.
    logits = torch.tensor([[0.2, 0.4, 0.2, 0.2]]).log()
    numbers = torch.tensor([0.1, 0.3, 0.7, 0.9])  # one in the share of each
    rows = logits.expand(4, -1).contiguous()
    for shape in ((1.0, 2.0, 1.0, 0.0), (1.0, 3.0, 0.5, 0.0)):
        assert set(sample_tokens(rows, shape, numbers)[0]) == {0, 1, 2, 3}
    for shape in ((1.0, 2.0, 0.3, 0.0), (1.0, 0.0, 0.35, 0.0), (1.0, 0.0, 1.0, 0.6)):
        assert sample_tokens(rows[:1], shape, numbers[3:])[0] == [1]


def test_the_nucleus_is_taken_of_what_top_k_kept() -> None:
    # Of 0.4, 0.3 (kept by top-k, mass 0.7), 0.4 is more than half: the nucleus is one token.
    rows = torch.tensor([[0.3, 0.2, 0.4, 0.1]]).log().expand(3, -1).contiguous()
    numbers = torch.tensor([0.0, 0.4, 0.99])
    assert set(sample_tokens(rows, (1.0, 2.0, 0.55, 0.0), numbers)[0]) == {2}
    assert set(sample_tokens(rows, (1.0, 0.0, 0.55, 0.0), numbers)[0]) == {0, 2}


def test_numbers_at_the_ends_fall_on_tokens_with_mass() -> None:
    logits = torch.full((2, 4500), -torch.inf)
    logits[:, [17, 3001]] = 0.0
    finite = logits.clamp(min=-1e30)
    assert sample_tokens(finite, (1.0, 0.0, 1.0, 0.0), [0.0, 1 - 2.0**-52])[0] == [17, 3001]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = logits_of(1, 3, 5000).clamp(max=1.0)
    expected = logits.argmax(-1).tolist()
    assert sample_tokens(logits, GREEDY, [0.5] * 3)[0] == expected
    found, _ = launch(logits, None, None, torch.ones(3, 4), torch.arange(3), None)
    assert found.tolist() == expected


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_reported_and_its_id_in_range(broken: float) -> None:
    logits = logits_of(2, 3, 100)
    whole, _ = sample_tokens(logits, (0.8, 5.0, 0.9, 0.0), [0.3, 0.6, 0.9])
    logits[1, 99] = broken
    for shape in ((0.8, 5.0, 0.9, 0.0), GREEDY):
        ids, is_finite = sample_tokens(logits, shape, [0.3, 0.6, 0.9])
        assert is_finite == [True, False, True]
        assert all(0 <= token < 100 for token in ids)
    assert sample_tokens(logits, (0.8, 5.0, 0.9, 0.0), [0.3, 0.6, 0.9])[0][::2] == whole[::2]


def test_edits_decide_and_the_model_s_own_logits_are_checked() -> None:
    logits = logits_of(3, 2, 70)
    edited = logits.clone()
    edited[0, logits[0].argmax()] = -torch.inf
    edited[1, 5] = 1e3
    ids, is_finite = sample_tokens(logits, GREEDY, [0.5, 0.5], edited=edited)
    assert ids == edited.argmax(-1).tolist()
    assert is_finite == [True, True]
    logits[0, 0] = torch.nan
    assert sample_tokens(logits, GREEDY, [0.5, 0.5], edited=edited)[1] == [False, True]


@pytest.mark.parametrize("vocab_size", [31, 2100])
def test_only_allowed_tokens_are_sampled(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    is_allowed = torch.rand(3, vocab_size, generator=generator) < 0.2
    is_allowed[:, 3] = True
    padded = torch.nn.functional.pad(is_allowed, (0, -vocab_size % 32)).view(3, -1, 32)
    words = (padded.long() << torch.arange(32)).sum(-1)
    allowed = (words - (words >> 31 << 32)).int()  # the highest bit is the sign
    logits = logits_of(5, 3, vocab_size)
    masked = logits.where(is_allowed, -1e30)
    numbers = torch.linspace(0.1, 0.9, 3)
    for shape in (GREEDY, (1.5, 4.0, 0.8, 0.01)):
        ids, is_finite = sample_tokens(logits, shape, numbers, allowed=allowed)
        assert ids == sample_tokens(masked, shape, numbers)[0]
        assert is_allowed[torch.arange(3), ids].all()
        assert all(is_finite)


def test_a_row_samples_the_same_in_any_batch() -> None:
    logits, numbers = logits_of(6, 2, 3000), torch.tensor([0.1, 0.6])
    shape = (1.0, 50.0, 0.9, 0.0)
    together, _ = sample_tokens(logits, shape, numbers)
    wide = torch.zeros(2, 3100)
    wide[:, :3000] = logits
    for row in range(2):
        alone, _ = sample_tokens(wide[row : row + 1, :3000], shape, numbers[row : row + 1])
        assert alone == together[row : row + 1]
