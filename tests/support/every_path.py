"""A decoder's rows through every path, after a prompt of 300 tokens, and what must hold of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from support.decoder_rig import Rig, Row, load_decoder
from triptych.core.runtime.kernels.native.library import NativeKernels

LONG = {"max_position_embeddings": 512, "initializer_range": 0.1}
PAGE_SIZE = 16


def open_rig(
    folder: Path,
    dtype: torch.dtype,
    native: NativeKernels | None,
    cache: torch.dtype | None = None,
) -> Rig:
    decoder = load_decoder(folder, dtype=dtype, native=native)
    assert (decoder._fused is None) == (native is None), "the whole step is one native call"
    layout = decoder.config.kv_layout(PAGE_SIZE, cache or dtype)
    return Rig(decoder, layout, native=native, max_length=512, max_batch_size=4)


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 199) for _ in range(length)]


def every_path(rig: Rig) -> list[Row]:
    """Chunks, decode steps, a preempted row, a prefix hit, and steps that mix them."""
    first, second = rig.open(prompt(300, 1)), rig.open(prompt(41, 2))
    for size in (64, 128, 7):
        rig.step((first, size))
    rig.step((first, 101), (second, 41))
    rig.decode(first, second, num_steps=31)
    rig.preempt(first)
    rig.step((first, 257), (second, 0))
    mate = rig.open(second.tokens[:48] + prompt(20, 3))
    rig.share(mate, second, 3)
    rig.step((first, len(first.tokens) - 257), (mate, 20), (second, 0))
    rig.decode(first, mate, num_steps=32)
    assert [len(row.logits) for row in (first, mate)] == [64 + 1, 33]
    return [first, second, mate]


def assert_same_tokens(rows: Sequence[Row], reference: Any) -> None:
    """Logits are the reference's, and so are the likeliest tokens."""
    for row in rows:
        with torch.inference_mode():
            expected_TV = reference(torch.tensor([row.tokens[:-1]])).logits[0]
        places = [position - 1 for position in row.logits]
        found_NV = torch.stack(list(row.logits.values()))
        torch.testing.assert_close(found_NV, expected_TV[places], atol=2e-4, rtol=2e-4)
        chosen = [row.tokens[position] for position in row.logits]
        assert expected_TV[places].argmax(1).tolist() == chosen


def assert_same_alone(rows: Sequence[Row], new_rig: Callable[[], Rig]) -> None:
    """A row has bitwise the same logits in a whole prompt and decode steps of its own."""
    for row in rows:
        rig = new_rig()
        alone = rig.open(row.tokens[: row.num_prompt_tokens])
        rig.prefill(alone)
        rig.decode(alone, num_steps=len(row.tokens) - row.num_prompt_tokens - 1)
        assert alone.tokens == row.tokens
        for position, logits_V in row.logits.items():
            assert torch.equal(alone.logits[position], logits_V)
