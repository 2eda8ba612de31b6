"""Masks of the vocabulary, against numpy; rows without one are as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.bound_rows import bound_row
from support.guided import allowed_ids
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.sampling.processors import keep_allowed
from triptych.core.runtime.sampling.sampler import Sampler

VOCAB_SIZE = 100
VOCAB_SIZES = (1, 31, 32, 33, 64, 1000)


def mask_of(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> bytes:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_what_a_mask_leaves_out_has_no_chance(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    shares = (0.3, 0.0, 1.0)  # of the vocabulary, that a row may sample
    kept = [generator.random(vocab_size) < share for share in shares]
    masks = [mask_of(np.flatnonzero(bits).tolist(), vocab_size) for bits in kept]
    logits_BV = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1))
    found_BV = keep_allowed(logits_BV, [masks[0], b"", masks[1], masks[2], b""])
    for row, bits in ((0, kept[0]), (2, kept[1]), (3, kept[2])):
        expected = np.where(bits, logits_BV[row].numpy(), -np.inf)
        np.testing.assert_array_equal(found_BV[row].numpy(), expected)
    torch.testing.assert_close(found_BV[[1, 4]], logits_BV[[1, 4]], rtol=0, atol=0)


def sampler(*sampling: SamplingParams, native: NativeKernels | None = None) -> Sampler:
    made = Sampler(
        vocab_size=VOCAB_SIZE, max_batch_size=8, device=torch.device("cpu"), native=native
    )
    for slot, params in enumerate(sampling):
        made.bind(bound_row(slot, params, (1, 2, 3)))
    return made


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 3},
        {"top_k": 2, "seed": 4},
        {"top_p": 0.1, "min_p": 0.5, "seed": 5},
        {"logit_bias": ((7, 100.0), (8, -100.0)), "seed": 6},
        {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "seed": 7},
        {"min_tokens": 5, "stop_token_ids": (40,), "seed": 8},
    ],
)
@pytest.mark.parametrize("is_native", [False, True])
def test_every_sample_is_one_of_those_allowed(
    given: dict[str, object], native: NativeKernels, *, is_native: bool
) -> None:
    kernels = native if is_native else None
    params = SamplingParams(**given)  # type: ignore[arg-type]
    sampled = set()
    for n in range(20):
        logits_BV = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(n)) * 5
        found = sampler(params, native=kernels).sample(
            logits_BV, [0], [3 + n], [mask_of([8, 41, 99])]
        )
        sampled.update(found.token_ids_B.tolist())
    assert sampled <= {8, 41, 99}
    assert len(sampled) > 1


def test_a_row_samples_the_same_with_rows_with_masks_and_without() -> None:
    params = [SamplingParams(seed=n, temperature=1.0, top_k=20, top_logprobs=2) for n in range(4)]
    logits_BV = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    masks = [b"", mask_of([3, 4, 5]), b"", mask_of(list(range(50)))]
    together = sampler(*params).sample(logits_BV, range(4), [3] * 4, masks).to_results()
    for row in range(4):
        alone = sampler(*params).sample(logits_BV[row : row + 1], [row], [3], [masks[row]])
        assert alone.to_results() == (together[row],)
    assert together[1].token_ids[0] in (3, 4, 5)
    unmasked = sampler(*params).sample(logits_BV, range(4), [3] * 4).to_results()
    assert [unmasked[row] for row in (0, 2)] == [together[row] for row in (0, 2)]
    # Log-probabilities are the model's own, whatever a grammar leaves out.
    assert unmasked[1].logprobs[0].top == together[1].logprobs[0].top


def test_masks_read_back() -> None:
    assert allowed_ids(mask_of([0, 31, 32, 99])) == [0, 31, 32, 99]
