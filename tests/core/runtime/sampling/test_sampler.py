import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support.bound_rows import bound_row
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta
from triptych.core.runtime.devices.upload import Uploads
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.sampling.host_copy import HostCopy
from triptych.core.runtime.sampling.logprobs import Logprobs
from triptych.core.runtime.sampling.randomness import stream_key, uniforms
from triptych.core.runtime.sampling.sampler import SampledTokens, Sampler

CPU = torch.device("cpu")
NUM_SLOTS = 8

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_p=st.sampled_from((0.0, 0.5, 0.95, 1.0)),
    top_k=st.sampled_from((0, 1, 5, 40, 10**9)),
    min_p=st.sampled_from((0.0, 0.1)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
    frequency_penalty=st.sampled_from((0.0, 0.7, -0.5)),
    presence_penalty=st.sampled_from((0.0, 1.1)),
    logit_bias=st.sampled_from(((), ((3, 4.0), (9, -100.0)))),
    min_tokens=st.sampled_from((0, 2)),
    stop_token_ids=st.sampled_from(((), (1, 2))),
    seed=st.integers(-(2**40), 2**40),
    sample_index=st.integers(0, 3),
    top_logprobs=st.sampled_from((None, 0, 4)),
)


def new_sampler(vocab_size: int = 100, native: NativeKernels | None = None) -> Sampler:
    return Sampler(vocab_size=vocab_size, max_batch_size=NUM_SLOTS, device=CPU, native=native)


def logits_of(seed: int, num_rows: int, vocab_size: int = 100, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(sampler: Sampler, logits: torch.Tensor, slot: int, position: int) -> TokenDelta:
    return sampler.sample(logits, [slot], [position]).to_results()[0]


def reference_edit(
    logits: torch.Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """Steps 1 to 3 for one row, by transformers' processors where it has them."""
    history = torch.tensor([[*prompt, *output]])
    scores = logits.double()[None]
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(history, scores)
    if params.stop_token_ids:
        stops = list(params.stop_token_ids)
        least = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stops)
        scores = least(history, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    for token in set(output):
        scores[0, token] -= params.frequency_penalty * list(output).count(token)
        scores[0, token] -= params.presence_penalty
    return scores


def reference_probs(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Steps 4 to 7 for one row."""
    scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0]


def assert_sampled(token: int, scores: torch.Tensor, params: SamplingParams, position: int) -> None:
    """The reference's distribution gives `token` at the position's random number."""
    if params.temperature < 1e-5 or params.top_k == 1 or params.top_p == 0:
        assert token == scores.argmax().item()
        return
    probs = reference_probs(scores, params)
    key = stream_key(params.seed, params.sample_index)
    uniform = uniforms(np.array([key], np.uint64), np.array([position]))[0]
    end = probs[: token + 1].sum().item()
    assert probs[token] > 0
    assert end - probs[token].item() - 1e-5 <= uniform <= end + 1e-5


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=NUM_SLOTS),
    seed=st.integers(0, 2**32),
    is_native=st.booleans(),
)
def test_every_sample_follows_the_per_row_reference(
    native: NativeKernels, params: list[SamplingParams], seed: int, is_native: bool
) -> None:
    sampler, num_rows = new_sampler(native=native if is_native else None), len(params)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 100, rng.integers(1, 20)).tolist() for _ in params]
    outputs: list[list[int]] = [[] for _ in params]
    slots = rng.permutation(NUM_SLOTS)[:num_rows].tolist()
    for slot, row_params, prompt in zip(slots, params, prompts, strict=True):
        sampler.bind(bound_row(slot, row_params, prompt))
    for step in range(4):
        logits = logits_of(seed + step, num_rows)
        before = logits.clone()
        positions = [len(prompt) + step for prompt in prompts]
        results = sampler.sample(logits, slots, positions).to_results()
        assert torch.equal(logits, before)
        for row, result in enumerate(results):
            scores = reference_edit(logits[row], params[row], prompts[row], outputs[row])
            assert_sampled(result.token_ids[0], scores, params[row], positions[row])
            outputs[row].extend(result.token_ids)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # it is set in each example
)
@given(
    params=st.lists(PARAMS, min_size=2, max_size=NUM_SLOTS),
    vocab_size=st.sampled_from((100, 8193, 49153)),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    is_native=st.booleans(),
    num_threads=st.sampled_from((1, 3)),
)
def test_a_row_is_the_same_alone_and_in_any_batch(
    native: NativeKernels,
    set_threads: Callable[[int], None],
    *,
    params: list[SamplingParams],
    vocab_size: int,
    seed: int,
    dtype: torch.dtype,
    is_native: bool,
    num_threads: int,
) -> None:
    kernels = native if is_native else None
    together = new_sampler(vocab_size, kernels)
    alone = [new_sampler(vocab_size, kernels) for _ in params]
    for slot, row_params in enumerate(params):
        together.bind(bound_row(slot, row_params, (5, 6, 7)))
        alone[slot].bind(bound_row(0, row_params, (5, 6, 7)))
    for step in range(3):
        logits = logits_of(seed + step, len(params), vocab_size).to(dtype)
        order = np.random.default_rng(seed + step).permutation(len(params)).tolist()
        set_threads(1)
        results = together.sample(logits[order], order, [3 + step] * len(params)).to_results()
        set_threads(num_threads)
        for row, result in zip(order, results, strict=True):
            assert result == sample_one(alone[row], logits[row : row + 1], 0, 3 + step)


@pytest.mark.parametrize("vocab_size", [49152, 151936])
@pytest.mark.parametrize("is_native", [False, True])
def test_large_vocabularies_sample_alike_alone_and_together(
    native: NativeKernels, vocab_size: int, *, is_native: bool
) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(top_p=0.9, seed=2),
        SamplingParams(top_k=50, min_p=0.01, seed=3),
    ]
    sampler = new_sampler(vocab_size, native if is_native else None)
    logits = logits_of(0, 4, vocab_size)
    for slot, row_params in enumerate(params):
        sampler.bind(bound_row(slot, row_params, (1,)))
    together = sampler.sample(logits, range(4), [1] * 4).to_results()
    for slot, row_params in enumerate(params):
        assert together[slot] == sample_one(sampler, logits[slot : slot + 1], slot, 1)
        assert_sampled(together[slot].token_ids[0], logits[slot : slot + 1].double(), row_params, 1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=12),
        SamplingParams(min_p=0.05),
    ],
    ids=["plain", "top_p", "top_k", "min_p"],
)
@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_samples_follow_the_distribution(params: SamplingParams, axis: str) -> None:
    num_samples, batch = 16_384, 256
    sampler = Sampler(vocab_size=30, max_batch_size=batch, device=CPU)
    row = logits_of(11, 1, 30, scale=1.5)
    logits = row.expand(batch, -1)
    counts = np.zeros(30)
    for first in range(0, num_samples, batch):
        for slot in range(batch):
            seed = first + slot if axis == "seeds" else slot
            sampler.bind(bound_row(slot, _with_seed(params, seed), ()))
        position = first // batch if axis == "positions" else 5
        sampled_tokens = sampler.sample(logits, range(batch), [position] * batch).token_ids_B
        counts += np.bincount(sampled_tokens.numpy(), minlength=30)
    expected = reference_probs(row.double(), params).numpy() * num_samples
    assert counts[expected == 0].sum() == 0
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < chi_square_bound(int(likely.sum()) - 1)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed,
    )


def chi_square_bound(num_degrees: int) -> float:
    """About the 1 - 1e-5 quantile (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * num_degrees)
    return num_degrees * (1 - spread + 4.27 * math.sqrt(spread)) ** 3


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    logits = logits_of(0, 1, scale=0.5)
    sampled_tokens = []
    for sample_index in (0, 1, 0):
        sampler = new_sampler()
        sampler.bind(bound_row(0, SamplingParams(seed=9, sample_index=sample_index), (1,)))
        sampled_tokens.append(
            [sample_one(sampler, logits, 0, position) for position in range(1, 20)]
        )
    assert sampled_tokens[0] == sampled_tokens[2] != sampled_tokens[1]


def test_a_resumed_row_continues_as_if_never_interrupted() -> None:
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.8, presence_penalty=0.3, min_tokens=6,
        stop_token_ids=(4,), seed=3,
    )  # fmt: skip
    steps = [logits_of(step, 1, scale=1.0) for step in range(12)]
    whole, first, resumed = new_sampler(), new_sampler(), new_sampler()
    whole.bind(bound_row(0, params, (8, 9)))
    expected = [sample_one(whole, steps[i], 0, 2 + i).token_ids[0] for i in range(12)]
    first.bind(bound_row(0, params, (8, 9)))
    output = [sample_one(first, steps[i], 0, 2 + i).token_ids[0] for i in range(5)]
    resumed.bind(bound_row(3, params, (8, 9), output))
    output += [sample_one(resumed, steps[i], 3, 2 + i).token_ids[0] for i in range(5, 12)]
    assert output == expected


def test_the_next_step_may_start_before_the_last_is_read() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler = new_sampler(10)
    sampler.bind(bound_row(0, params, (1,)))
    logits = torch.tensor([[5.0, 4.0, 3.5, *[0.0] * 7]])
    pending = [sampler.sample(logits, [0], [position]) for position in range(1, 5)]
    assert [step.to_results()[0].token_ids[0] for step in pending] == [0, 1, 2, 0]


def test_a_reused_slot_forgets_its_last_row() -> None:
    sampler = new_sampler()
    edited = SamplingParams(
        temperature=0.0, logit_bias=((7, 100.0),), presence_penalty=1.0, min_tokens=5,
        stop_token_ids=(3,), top_logprobs=2,
    )  # fmt: skip
    logits = torch.zeros(1, 100)
    logits[0, 3] = 1.0
    sampler.bind(bound_row(0, edited, (1,)))
    assert sample_one(sampler, logits, 0, 1).token_ids == (7,)
    sampler.bind(bound_row(0, SamplingParams(temperature=0.0), (1,)))
    assert sample_one(sampler, logits, 0, 1) == TokenDelta(token_ids=(3,))
    sampler.bind(bound_row(0, SamplingParams(temperature=0.0, logit_bias=((9, 2.0),)), (1,)))
    assert sample_one(sampler, logits, 0, 1).token_ids == (9,)
    sampler.bind(bound_row(0, SamplingParams(temperature=0.0, presence_penalty=0.5), (1,)))
    assert sample_one(sampler, logits, 0, 1).token_ids == (3,)


def test_min_tokens_forbids_every_stop_until_enough_output() -> None:
    sampler = new_sampler()
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(0, 5))
    sampler.bind(bound_row(0, params, (1, 2)))
    logits = logits_of(0, 1)
    logits[0, 0], logits[0, 5] = 50.0, 60.0
    sampled_tokens = [
        sample_one(sampler, logits, 0, position).token_ids[0] for position in range(2, 6)
    ]
    assert not {0, 5} & set(sampled_tokens[:3])
    assert sampled_tokens[3] == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(bad: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.1)
    sampler, healthy = new_sampler(), new_sampler()
    logits = logits_of(0, 3)
    for slot in range(3):
        sampler.bind(bound_row(slot, params, (1,)))
        healthy.bind(bound_row(slot, params, (1,)))
    expected = healthy.sample(logits, range(3), [1] * 3).to_results()
    logits[1, 42] = bad
    sampled = sampler.sample(logits, range(3), [1] * 3)
    results = sampled.to_results()
    assert sampled.is_finite_B.tolist() == [True, False, True]
    assert results[1] == TokenDelta(is_finite=False)
    assert (results[0], results[2]) == (expected[0], expected[2])
    assert 0 <= sampled.token_ids_B[1] < 100


def test_an_id_out_of_range_fails_its_row() -> None:
    ids = torch.tensor([3, 100])
    sampled = SampledTokens(ids, ids > 0, 100, HostCopy(ids), (-1, -1), None)
    assert [row.is_finite for row in sampled.to_results()] == [True, False]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.0),
    )
    sampler = new_sampler()
    for slot, row_params in enumerate(params):
        sampler.bind(bound_row(slot, row_params, (1,)))
    logits = torch.zeros(4, 100)
    logits[:, [30, 60]] = 1.0
    assert sampler.sample(logits, range(4), [1] * 4).token_ids_B.tolist() == [30] * 4


@pytest.mark.parametrize("vocab_size", [100, 8193, 49152, 151936])
def test_logprobs_are_of_the_raw_distribution(vocab_size: int) -> None:
    params = [
        SamplingParams(temperature=0.0, top_logprobs=3, logit_bias=((17, 50.0),)),
        SamplingParams(seed=1),
        SamplingParams(temperature=0.5, top_k=9, top_logprobs=0),
        SamplingParams(temperature=2.0, top_logprobs=20),
    ]
    sampler = new_sampler(vocab_size)
    for slot, row_params in enumerate(params):
        sampler.bind(bound_row(slot, row_params, (1,)))
    logits = logits_of(5, 4, vocab_size)
    expected = logits.double().log_softmax(-1)
    results = sampler.sample(logits, range(4), [1] * 4).to_results()
    assert results[0].token_ids == (17,)
    assert results[1].logprobs == ()
    for row in (0, 2, 3):
        (entry,) = results[row].logprobs
        assert (entry.token_id,) == results[row].token_ids
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-4)
        best = expected[row].topk(params[row].top_logprobs or 0)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_logprobs() -> None:
    logits, next_ids = logits_of(6, 5), torch.tensor([4, 0, 99, 50, 7])
    entries = Logprobs.of(logits, next_ids, 2).to_entries([2] * 5)
    expected = logits.log_softmax(-1)
    for row, entry in enumerate(entries):
        assert entry.token_id == next_ids[row]
        assert entry.logprob == pytest.approx(expected[row, next_ids[row]].item(), abs=1e-5)
        assert entry.top[0][0] == logits[row].argmax()
        assert len(entry.top) == 2


def test_log_probabilities_are_bitwise_the_same_in_any_batch(
    set_threads: Callable[[int], None],
) -> None:
    """A long row alone is work enough for several threads; it must not be summed in their parts."""
    logits = logits_of(8, 48, 49153)
    next_ids = torch.arange(48)
    set_threads(1)
    together = Logprobs.of(logits, next_ids, 2).to_entries([2] * 48)
    set_threads(3)
    for row in range(48):
        only = slice(row, row + 1)
        alone = Logprobs.of(logits[only], next_ids[only], 2).to_entries([2])
        assert alone == (together[row],)


def test_equal_alternatives_are_ordered_by_id() -> None:
    logits = torch.zeros(1, 12)
    logits[0, 8] = 1.0
    (entry,) = Logprobs.of(logits, torch.tensor([3]), 20).to_entries([20])
    assert [token for token, _ in entry.top] == [8, *range(8), *range(9, 12)]


def refuse(*_: object, **__: object) -> torch.Tensor:
    raise AssertionError("a copy of its own")


@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_a_step_tells_the_device_goes_over_in_one_copy(
    monkeypatch: pytest.MonkeyPatch, is_mixed: bool
) -> None:
    sampler = new_sampler()
    monkeypatch.setattr(torch, "tensor", refuse)
    greedy = SamplingParams(temperature=0.0, top_logprobs=1)
    rich = SamplingParams(
        top_k=5, min_p=0.1, logit_bias=((3, 4.0),), repetition_penalty=1.3, top_logprobs=2
    )
    for slot, sampling in enumerate((greedy, rich if is_mixed else greedy)):
        sampler.bind(bound_row(slot, sampling, (1, 2)))
    sent: list[int] = []

    def send(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        sent.append(len(arrays))
        return Uploads(CPU).send(arrays)

    monkeypatch.setattr(sampler._uploads, "send", send)
    sampler.sample(torch.zeros(2, 100), (0, 1), (2, 2))
    frame = sampler.frame_sampler((0, 1), (2, 2), 3)
    frame.sample(torch.zeros(2, 100), 0)
    frame.sample_all(torch.zeros(2, 3, 100))
    assert len(sent) == 2
    assert (sent[0] > 3) == is_mixed


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_drafts_are_sampled_as_one_after_the_other(
    native: NativeKernels, is_native: bool, temperature: float
) -> None:
    """Penalties count the drafts that are right, and nothing after a wrong one."""
    penalized = SamplingParams(
        temperature=temperature, seed=5, repetition_penalty=1.5, frequency_penalty=0.8
    )
    logits_TV = logits_of(4, 1).expand(6, -1) + logits_of(7, 6, scale=0.1)
    samplers = [new_sampler(native=native if is_native else None) for _ in range(2)]
    for sampler in samplers:
        sampler.bind(bound_row(0, penalized, (1, 2)))
        sampler.bind(bound_row(1, SamplingParams(temperature=temperature, seed=6)))
    one_by_one, at_once = samplers
    expected = [
        sample_one(one_by_one, logits_TV[n : n + 1], 0, 2 + n).token_ids[0] for n in range(6)
    ]
    wrong = (expected[2] + 1) % 100
    found = at_once.sample(
        logits_TV[[0, 0, 0, 1, 2, 3, 4]],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 2, 2, 3, 4, 5, 6],
        (),
        [3, -1, expected[0], expected[1], wrong, expected[3], -1],
    )
    tokens = [result.token_ids[0] for result in found.to_results()]
    assert tokens[2:5] == expected[:3]
    assert len(set(expected)) > 1
    after = [sample_one(at_once, logits_TV[n : n + 1], 0, 2 + n).token_ids[0] for n in (3, 4, 5)]
    assert after == expected[3:]
