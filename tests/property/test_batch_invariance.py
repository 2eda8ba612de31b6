"""Random batches: a row's logits are bitwise those of its request alone.

Whatever else runs, however its prompt is cut, whatever of it was cached, preempted or shared, and
however many threads there are. For tiny decoders of many shapes, in the types that users get, on
every level of instructions that this machine has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from support.batch_driver import MAX_LENGTH, BatchDriver, alone, is_same, random_decoder
from support.kernel_levels import FLOAT32_LEVELS, LEVELS
from support.tiers import among
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenDelta, TokenRequest
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.altup import AltUpConfig
from triptych.core.runtime.layers.attention import AttentionConfig, HeadNormConfig, KvLayout
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.delta_net import DeltaNetConfig
from triptych.core.runtime.layers.latent_attention import LatentConfig
from triptych.core.runtime.layers.layer_inputs import LayerInputConfig
from triptych.core.runtime.layers.rotary import QueryScaling, RopeConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARED_PROMPT = tuple(torch.randint(90, (64,), generator=torch.Generator().manual_seed(1)).tolist())
SAMPLING = (
    SamplingParams(temperature=0.0, top_logprobs=2),
    SamplingParams(seed=1, temperature=0.7),
    SamplingParams(seed=2, top_p=0.9, top_k=30, top_logprobs=0),
    SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(seed=4, logit_bias=((7, 3.0),), frequency_penalty=0.5),
    SamplingParams(temperature=0.0, prompt_logprobs=True, top_logprobs=3),
)


def decoder_config(
    hidden: int,
    heads: tuple[int, int, int],
    intermediate: int,
    *,
    vocab_size: int = 193,
    layers: tuple[dict[str, Any], ...] = ({}, {}),
    num_rotated: int | None = None,
    **more: Any,
) -> DecoderConfig:
    """`heads` are query heads, key-value heads and their size; `layers` what is special to each."""
    num_heads, num_kv_heads, head_dim = heads
    rope = RopeConfig(num_rotated_dims=num_rotated or head_dim, max_length=256, trained_length=256)
    common = AttentionConfig(
        hidden_size=hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        norm_eps=1e-5,
        attention=tuple(replace(common, **special) for special in layers),
        rope=rope,
        local_rope=replace(rope, theta=1e6) if more.get("has_post_norms") else None,
        **more,
    )


BIASED = {"has_qkv_bias": True, "has_out_bias": True}
OWN = {"head_norm": HeadNormConfig(eps=1e-6), "value_norm_eps": 1e-6, "scale": 0.2}
GEMMA = {"head_norm": HeadNormConfig(eps=1e-6, is_centred=True), "scale": 0.1}
SHAPES = {
    "gqa-32": decoder_config(64, (4, 2, 32), 112),
    "mha-64-biased-tied": decoder_config(
        96, (2, 2, 64), 128, layers=(BIASED, BIASED), has_mlp_bias=True, has_tied_embeddings=True
    ),
    "mqa-80-ragged": decoder_config(50, (3, 1, 80), 74, vocab_size=101),
    "gqa-128-qk-norm-tied": decoder_config(
        48,
        (4, 1, 128),
        64,
        layers=({"head_norm": HeadNormConfig(eps=1e-6)},) * 2,
        has_tied_embeddings=True,
    ),
    "windows-without-rope": decoder_config(
        64, (4, 2, 32), 96, layers=({"window": 9}, {"uses_rope": False}, {"window": 40})
    ),
    "half-rotated": decoder_config(64, (3, 3, 64), 96, num_rotated=32),
    "gemma-256": decoder_config(
        64,
        (2, 1, 256),
        1000,
        layers=({**GEMMA, "window": 12, "uses_local_rope": True}, GEMMA),
        activation="gelu_tanh",
        embedding_scale=8.0,
        has_centred_norms=True,
        has_post_norms=True,
        has_tied_embeddings=True,
    ),
    "a-kind-for-each-layer": decoder_config(
        80,
        (4, 2, 24),
        72,
        layers=(
            {**OWN, "window": 12, "uses_local_rope": True},
            {**OWN, "head_dim": 48, "num_kv_heads": 1, "soft_cap": 5.0},
            {**OWN, "window": 12, "uses_local_rope": True, "reads_layer": 0},
            {"head_dim": 48, "num_kv_heads": 1, "has_sinks": True, "scales_queries": True},
        ),
        num_rotated=24,
        mlp_sizes=(72, 72, 144, 72),
        activation="gelu_tanh",
        has_post_norms=True,
        has_layer_scales=True,
        layer_inputs=LayerInputConfig(
            hidden_size=80, size=20, num_layers=4, vocab_size=150, norm_eps=1e-5
        ),
        query_scaling=QueryScaling(beta=0.3, length=20),
        logit_cap=8.0,
    ),
    "several-streams": decoder_config(
        72,
        (4, 2, 24),
        100,
        layers=({**OWN, "window": 12, "uses_local_rope": True}, {**OWN, "reads_layer": 0}),
        activation="gelu_tanh",
        has_post_norms=True,
        layer_inputs=LayerInputConfig(
            hidden_size=72, size=20, num_layers=2, vocab_size=150, norm_eps=1e-5
        ),
        altup=AltUpConfig(hidden_size=72, num_streams=3, laurel_rank=84, norm_eps=1e-5),
        gate_deviations=(0.5, 0.0),
    ),
    "parallel-layer-norms": decoder_config(
        72,
        (6, 3, 20),
        90,
        layers=({"head_norm": HeadNormConfig(eps=1e-5, kind="layer", has_own_weights=True)},) * 2,
        num_rotated=12,
        norm_kind="layer",
        has_norm_bias=True,
        is_parallel=True,
        has_gate=False,
        activation="relu2",
        logit_scale=0.5,
    ),
    "normed-after": decoder_config(
        72,
        (6, 3, 20),
        90,
        layers=(
            {"head_norm": HeadNormConfig(eps=1e-5, is_joint=True), "has_interleaved_rope": True},
            {"head_norm": HeadNormConfig(eps=1e-5, is_after_rotation=True)},
        ),
        has_pre_norms=False,
        has_post_norms=True,
    ),
    "key-decays-beside-latents": replace(
        decoder_config(72, (4, 4, 24), 90),
        attention=(
            DeltaNetConfig(
                hidden_size=72,
                num_key_heads=3,
                num_value_heads=3,
                key_dim=20,
                value_dim=20,
                width=4,
                norm_eps=1e-5,
                has_key_decays=True,
                low_rank=20,
                gate="sigmoid",
            ),
            LatentConfig(
                hidden_size=72,
                num_heads=4,
                nope_dim=16,
                rope_dim=24,
                value_dim=12,
                kv_rank=40,
                q_rank=None,
                scale=0.2,
            ),
        ),
    ),
    "scaled-residuals": decoder_config(64, (4, 2, 32), 112, residual_scale=0.3),
    "smollm2-135m-wide": decoder_config(576, (9, 3, 64), 1536, vocab_size=4999, layers=({},)),
}


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A request: so many tokens of the story, then its own; it comes at a turn, and may leave."""

    num_shared: int
    num_own: int
    num_answered: int
    sampling: int
    comes: int
    leaves: int | None

    def request(self, index: int) -> TokenRequest:
        own = tuple((index * 31 + n * 7) % 90 for n in range(self.num_own))
        sampling = msgspec.structs.replace(SAMPLING[self.sampling], max_tokens=self.num_answered)
        return TokenRequest(prompt_ids=SHARED_PROMPT[: self.num_shared] + own, sampling=sampling)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    visits: tuple[Visit, ...]
    page_size: int
    spare_pages: int
    max_batch_size: int
    budget: int
    depth: int
    num_threads: tuple[int, ...]
    has_other_pages: bool


VISITS = st.builds(
    Visit,
    num_shared=st.sampled_from((0, 0, 17, 32, 33, 64)),
    num_own=st.integers(1, 40),
    num_answered=st.integers(1, 8),
    sampling=st.integers(0, len(SAMPLING) - 1),
    comes=st.integers(0, 12),
    leaves=st.none() | st.integers(1, 20),
)
SCHEDULES = st.builds(
    Schedule,
    visits=st.lists(VISITS, min_size=2, max_size=14).map(tuple),
    page_size=st.sampled_from((4, 8, 16)),
    spare_pages=st.sampled_from((0, 3, 200)),
    max_batch_size=st.sampled_from((3, 8, 20)),
    budget=st.sampled_from((7, 24, 61, 512)),
    depth=st.integers(1, 3),
    num_threads=st.sampled_from(((1,), (1, 3))),
    has_other_pages=st.booleans(),
)


MIXED = Schedule(
    visits=tuple(
        Visit(
            num_shared=(0, 33, 64, 17)[index % 4],
            num_own=1 + index * 3 % 29,
            num_answered=20,
            sampling=index % len(SAMPLING),
            comes=index // 2,
            leaves=9 if index == 5 else None,
        )
        for index in range(14)
    ),
    page_size=4,
    spare_pages=0,
    max_batch_size=20,
    budget=40,
    depth=2,
    num_threads=(1, 3),
    has_other_pages=False,
)


@pytest.fixture(autouse=True)
def _threads(set_threads: Callable[[int], None]) -> None:
    """Schedules change the number of threads."""


@lru_cache
def decoder_of(shape: str, dtype: str, kernels: NativeKernels) -> Decoder:
    return random_decoder(SHAPES[shape], DTYPES[dtype], kernels)


@lru_cache(maxsize=2000)
def reference(
    shape: str, dtype: str, kernels: NativeKernels, request: TokenRequest, layout: KvLayout
) -> tuple[dict[int, torch.Tensor], list[TokenDelta]]:
    return alone(decoder_of(shape, dtype, kernels), layout, kernels, request)


@pytest.mark.parametrize(
    ("isa", "dtype"),
    among(
        [*product(LEVELS, ["bfloat16"]), *product(FLOAT32_LEVELS, ["float32"])],
        [(LEVELS[0], "bfloat16"), (LEVELS[-1], "bfloat16"), (FLOAT32_LEVELS[-1], "float32")],
    ),
    scope="session",
)
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=1, deadline=None, phases=set(Phase) - {Phase.explain})
@example(schedule=MIXED)
@given(schedule=SCHEDULES)
def test_logits_are_bitwise_those_of_the_request_alone(
    kernels: NativeKernels, shape: str, dtype: str, schedule: Schedule
) -> None:
    decoder = decoder_of(shape, dtype, kernels)
    layout = decoder.config.kv_layout(schedule.page_size, page_dtype(dtype, schedule))
    driver = live(decoder, layout, kernels, schedule)
    whole = replace(layout, page_size=16)
    torch.set_num_threads(1)
    for index, visit in enumerate(schedule.visits):
        logits, deltas = reference(shape, dtype, kernels, visit.request(index), whole)
        assert_same(driver, str(index), logits, deltas)


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_pages_of_one_byte_a_cell_change_nothing_of_that(
    kernels: NativeKernels, cache: torch.dtype
) -> None:
    decoder = decoder_of("windows-without-rope", "bfloat16", kernels)
    driver = live(decoder, decoder.config.kv_layout(MIXED.page_size, cache), kernels, MIXED)
    torch.set_num_threads(1)
    whole = decoder.config.kv_layout(64, cache)
    for index, visit in enumerate(MIXED.visits):
        assert_same(driver, str(index), *alone(decoder, whole, kernels, visit.request(index)))


def test_the_mixed_schedule_reaches_every_case(kernels: NativeKernels) -> None:
    """Prefix hits, evictions, preemptions, chunks of prompts beside answers, one who leaves."""
    decoder = decoder_of("gqa-32", "bfloat16", kernels)
    layout = decoder.config.kv_layout(MIXED.page_size, torch.bfloat16)
    driver = live(decoder, layout, kernels, MIXED)
    counters = driver.pool.counters
    assert min(counters.num_hits, counters.num_evictions) > 0
    last = [driver.deltas(job_id)[-1] for job_id in driver.jobs]
    assert sum(delta.num_preemptions for delta in last) > 0
    assert [delta.finish_reason for delta in last].count("cancelled") == 1
    assert driver.num_mixed_steps > 0


def page_dtype(dtype: str, schedule: Schedule) -> torch.dtype:
    """The cache may keep what a model computes in the other type."""
    other = {"bfloat16": "float32", "float32": "bfloat16"}
    return DTYPES[other[dtype] if schedule.has_other_pages else dtype]


def live(
    decoder: Decoder, layout: KvLayout, kernels: NativeKernels, schedule: Schedule
) -> BatchDriver:
    """Go through a schedule to its end, with pages of their own for layers with a window."""
    rows, windows = schedule.max_batch_size, None
    if window := layout.longest_window:
        size = layout.page_size
        windows = WindowSize.least(window, size, num_rows=rows, step_tokens=schedule.budget)
    driver = BatchDriver(
        decoder,
        layout,
        kernels,
        num_pages=-(-MAX_LENGTH // schedule.page_size) + schedule.spare_pages,
        depth=schedule.depth,
        max_batch_size=rows,
        max_batch_input_tokens=schedule.budget,
        windows=windows,
    )
    for turn in range(21):
        torch.set_num_threads(schedule.num_threads[turn % len(schedule.num_threads)])
        for index, visit in enumerate(schedule.visits):
            if visit.comes == turn:
                driver.submit(str(index), visit.request(index))
            if visit.leaves == turn:
                driver.scheduler.cancel(str(index))
        driver.turn()
    driver.run()
    return driver


def assert_same(
    driver: BatchDriver, job_id: str, logits: dict[int, torch.Tensor], deltas: list[TokenDelta]
) -> None:
    for position, logits_V in driver.logits[job_id].items():
        difference = (logits_V - logits[position]).abs().max().item()
        has_same_bits = is_same(logits_V, logits[position])
        assert has_same_bits, f"logits of job {job_id} for position {position}: {difference=}"
        assert difference == 0.0, "finite, then"
    got, wanted = driver.deltas(job_id), deltas
    got_ids = [token for delta in got for token in delta.token_ids]
    assert got_ids == [token for delta in wanted for token in delta.token_ids][: len(got_ids)]
    scored = [entry for delta in got for entry in (*delta.prompt_logprobs, *delta.logprobs)]
    expected = [entry for delta in wanted for entry in (*delta.prompt_logprobs, *delta.logprobs)]
    assert scored == expected[: len(scored)]
    if got[-1].finish_reason != "cancelled":
        assert len(got_ids) == sum(len(delta.token_ids) for delta in wanted)
