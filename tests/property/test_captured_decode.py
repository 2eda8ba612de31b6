"""A thousand random steps with captured decoding: bit for bit those of the same steps run eagerly.

Each replay is compared with the same bucket run eagerly (`--debug-verify-replay`), and every row of
logits with that of a second engine that goes through the same visits and captures nothing, so pads
nothing. Pages, those that padding writes to among them, are full of NaN at first.
"""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from support.batch_driver import MAX_LENGTH, BatchDriver, is_same, random_decoder
from support.captured import verified_steps
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.windows import WindowSize
from triptych.core.runtime.graphs.buckets import DecodeBuckets
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import AttentionConfig
from triptych.core.runtime.layers.decoder_layer import DecoderConfig
from triptych.core.runtime.layers.rotary import RopeConfig

MAX_ROWS, PAGE_SIZE, VOCAB = 11, 4, 101
SAMPLING = (
    SamplingParams(temperature=0.0, top_logprobs=2),
    SamplingParams(seed=1, temperature=0.7),
    SamplingParams(seed=2, top_p=0.9, top_k=30),
    SamplingParams(seed=3, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(seed=4, logit_bias=((7, 3.0),), frequency_penalty=0.5),
)


def config(window: int | None) -> DecoderConfig:
    attention = AttentionConfig(
        hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=32, window=window
    )
    rope = RopeConfig(num_rotated_dims=32, max_length=256, trained_length=256)
    return DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        norm_eps=1e-5,
        attention=(attention, attention),
        rope=rope,
    )


def go_through(driver: BatchDriver, seed: int, num_turns: int) -> None:
    """Visits at random; some leave before they are answered."""
    chance = random.Random(seed)
    for turn in range(num_turns):
        if chance.random() < 0.12:
            prompt = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 40)))
            sampling = msgspec.structs.replace(
                chance.choice(SAMPLING), max_tokens=chance.randint(1, 90)
            )
            driver.submit(str(turn), TokenRequest(prompt_ids=prompt, sampling=sampling))
        if chance.random() < 0.01:
            driver.scheduler.cancel(str(chance.randrange(turn + 1)))
        driver.turn()
    driver.run()


@pytest.mark.parametrize(
    ("dtype", "cache", "window", "num_turns"),
    [
        (torch.bfloat16, torch.bfloat16, None, 1200),
        (torch.float32, torch.float32, 19, 200),
        (torch.bfloat16, torch.int8, None, 100),
    ],
)
def test_replays_are_bitwise_eager(
    native: NativeKernels,
    dtype: torch.dtype,
    cache: torch.dtype,
    window: int | None,
    num_turns: int,
) -> None:
    decoder = random_decoder(config(window), dtype, native)
    layout = decoder.config.kv_layout(PAGE_SIZE, cache)
    steps, backend = verified_steps()
    buckets = DecodeBuckets.choose(MAX_ROWS - 2, -(-MAX_LENGTH // PAGE_SIZE))
    options = {"num_pages": 90, "depth": 2, "max_batch_size": MAX_ROWS}
    windows = None  # pages of their own for window layers, in the captured steps alone
    if window is not None:
        windows = WindowSize.least(window, PAGE_SIZE, num_rows=MAX_ROWS, step_tokens=256)
    graphs = DecodeGraphs(steps, buckets)
    captured = BatchDriver(decoder, layout, native, graphs=graphs, windows=windows, **options)
    eager = BatchDriver(decoder, layout, native, **options)
    for driver in (captured, eager):
        go_through(driver, 5, num_turns)
    assert backend.num_replays >= min(1000, num_turns)
    assert steps.num_captured > len(buckets.all()) / 2
    assert captured.logits.keys() == eager.logits.keys()
    for job_id, logits in eager.logits.items():
        assert captured.logits[job_id].keys() == logits.keys()
        assert all(is_same(captured.logits[job_id][at], row_V) for at, row_V in logits.items())
        assert captured.payloads(job_id) == eager.payloads(job_id)
