"""Captured steps with prompt chunks, on the kernels of a GPU: equal to the steps run in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.captured import CountingCalls, verified_steps
from support.decoder_rig import Recorder, Rig, Row, decoder_rig, small_decoder
from support.gpu_rehearsal import rehearse_gpu
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.runtime.graphs.buckets import Bucket, DecodeBuckets, PromptBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.layers.attention import PagedStep
from triptych.core.runtime.layers.decoder import Decoder

MAX_ROWS, MAX_LENGTH, PAGE_SIZE = 16, 96, 4
PROMPTS = PromptBuckets.choose(MAX_ROWS, MAX_LENGTH, PAGE_SIZE)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return small_decoder(tmp_path_factory.mktemp("captured"), **heads)


class OnGpu(Recorder):
    """The model runs on interpreted kernels, all else on the CPU."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            rehearse_gpu(patch)
            return super().forward(ids, positions, step)


def captured_rig(decoder: Decoder, recorder: type[Recorder] = OnGpu) -> tuple[Rig, CountingCalls]:
    steps, backend = verified_steps()
    graphs = DecodeGraphs(steps, DecodeBuckets((), ()), prompts=PROMPTS)
    return decoder_rig(decoder, graphs=graphs, recorder=recorder), backend


def mixed_steps(rig: Rig) -> list[Row]:
    """Prompts alone, a chunk that samples nothing, and both with decoding rows."""
    scored = SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=1)
    first, second = rig.open(tuple(range(1, 8))), rig.open((9, 8, 7), scored)
    rig.prefill(first, second)
    third = rig.open(tuple(range(30, 50)))
    rig.step((first, 0), (second, 0), (third, 9))
    rig.step((first, 0), (third, 11))
    fourth = rig.open((5,))
    rig.step((third, 0), (second, 0), (first, 0), (fourth, 1))
    return [first, second, third, fourth]


def test_tokens_are_those_of_the_steps_in_torch(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder)
    rows, expected = mixed_steps(rig), mixed_steps(decoder_rig(decoder))
    assert backend.num_replays == 4
    for row, wanted in zip(rows, expected, strict=True):
        assert row.tokens == wanted.tokens
        assert row.logits.keys() == wanted.logits.keys()
        for at, logits_V in wanted.logits.items():
            torch.testing.assert_close(row.logits[at], logits_V, rtol=1e-4, atol=1e-4)


def test_padding_writes_to_its_own_page_alone(decoder: Decoder) -> None:
    rig, backend = captured_rig(decoder)
    first = rig.open((1, 2, 3))
    rig.prefill(first)
    for pages in rig.kv.tensors:
        pages.zero_()
    second = rig.open(tuple(range(5)))
    rig.step((first, 0), (second, 5))
    assert backend.num_replays == 2
    own = {row.pages[n // PAGE_SIZE] for row in (first, second) for n in range(row.num_cached)}
    own -= {first.pages[0]} - {first.pages[(first.num_cached - 1) // PAGE_SIZE]}
    for pages in rig.kv.tensors:
        written = set(pages.flatten(1).any(dim=1).nonzero().flatten().tolist())
        assert written == own | {rig.kv.num_pages - 2}


class Poisoned(OnGpu):
    """Hidden states and the cache are NaN wherever token 66 goes in, as it does in padding."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        hidden_TC = super().forward(ids, positions, step)
        hidden_TC[(ids == 66) | (ids == 0)] = torch.nan
        return hidden_TC


def test_nan_of_padding_and_of_one_row_reach_no_other(decoder: Decoder) -> None:
    rig, _ = captured_rig(decoder, Poisoned)
    result = rig.step(*((rig.open(prompt), 3) for prompt in ((1, 2, 3), (4, 5, 66), (7, 8, 9))))
    assert [row.is_finite for row in result.rows] == [True, False, True]


@pytest.mark.parametrize(
    ("size", "bucket"),
    [
        ((0, 1, 3, 1), Bucket(16, 16, 16, 16)),
        ((1, 2, 17, 1), Bucket(8 + 16, 8 + 32, 16, 16)),
        ((9, 15, 64, 17), Bucket(16 + 16, 16 + 64, 24, 16)),
        ((1, 1, 65, 17), Bucket(8 + 16, 8 + 96, 24, 16)),
        ((0, 16, 20, 1), None),  # a chunk is left for padding
        ((17, 1, 3, 1), None),
        ((0, 1, 97, 25), None),
    ],
)
def test_steps_get_the_smallest_bucket(
    size: tuple[int, int, int, int], bucket: Bucket | None
) -> None:
    assert PROMPTS.fit(*size) == bucket


def test_tables_are_as_wide_as_the_padding_is_long() -> None:
    prompts = PromptBuckets.choose(4, 4096, 1)
    found: Any = prompts.fit(0, 1, 300, 1)
    assert found.pages >= found.tokens - 300
