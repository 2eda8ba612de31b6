"""Dense families against transformers: long prompts over windows, through every path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.decoder_families import TINY
from support.decoder_rig import (
    Rig,
    Row,
    assert_errs_no_more_than_in_bfloat16,
    decoder_rig,
    load_decoder,
)
from support.dense_families import DENSE
from support.kernel_levels import LEVELS
from support.tiers import among
from triptych.core.runtime.kernels.native.library import NativeKernels

MAX_LENGTH = 400
SOME = {"gemma4", "gemma3n", "olmo3", "phi3", "cohere2", "granite"}
"""Families that differ most, for what all families have."""
KERNELS = ["torch", *LEVELS[:1]]
Build = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Saves a tiny random checkpoint with transformers; returns its folder and the reference."""

    @lru_cache(maxsize=1)
    def make(family: str) -> tuple[Path, Any]:
        folder, (kind, extra) = tmp_path_factory.mktemp(family), DENSE[family]
        sizes = {**TINY, "max_position_embeddings": 512, **extra}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        fill_small(model.eval())
        model.save_pretrained(folder)
        return folder, model

    yield make
    make.cache_clear()


def fill_small(model: Any) -> None:
    """Give norms, biases and scales values that are not 0 or 1."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or name.endswith("bias"):
            tensor.data += torch.randn(tensor.shape) * 0.2
        elif name.endswith("layer_scalar"):
            tensor.fill_(0.7)


@pytest.fixture(params=DENSE)
def model(request: pytest.FixtureRequest, build: Build) -> tuple[Path, Any]:
    return build(request.param)


def prompt(length: int) -> list[int]:
    source = random.Random(length)
    return [source.randrange(3, TINY["vocab_size"]) for _ in range(length)]


def rig_of(folder: Path, native: NativeKernels | None, dtype: torch.dtype) -> Rig:
    decoder = load_decoder(folder, max_length=MAX_LENGTH, native=native, dtype=dtype)
    assert (decoder._fused is None) == (native is None), "the whole step is one native call"
    return decoder_rig(decoder, native=native, max_length=MAX_LENGTH, max_batch_size=4)


def through_every_path(rig: Rig) -> list[Row]:
    """A row of 300 in chunks beside another, a prefix hit, a preemption; 64 tokens of the first."""
    long, short = rig.open(prompt(300)), rig.open(prompt(21))
    rig.step((long, 150))
    rig.step((long, 7), (short, 21))
    rig.step((long, 143), (short, 0))
    rig.decode(long, short, num_steps=10)
    rig.preempt(short)
    mate = rig.open(long.tokens[:288] + prompt(9))
    rig.share(mate, long, 72)
    rig.step((mate, 9), (short, 25), (long, 0))
    rig.prefill(short)
    rig.decode(long, mate, short, num_steps=3)
    rig.decode(long, num_steps=49)
    return [long, short, mate]


def test_logits_and_greedy_tokens_are_those_of_transformers(
    model: tuple[Path, Any], kernels_of: Callable[[str], NativeKernels]
) -> None:
    """In float32, by torch and by our kernels."""
    folder, reference = model
    expected: dict[tuple[int, ...], torch.Tensor] = {}
    for kind in KERNELS:
        native = None if kind == "torch" else kernels_of(kind)
        rows = through_every_path(rig_of(folder, native, torch.float32))
        assert len(rows[0].tokens) == 300 + 64
        for row in rows:
            tokens = tuple(row.tokens[:-1])
            if tokens not in expected:
                with torch.inference_mode():
                    expected[tokens] = reference(torch.tensor([tokens])).logits[0]
            assert_same(row, expected[tokens])


def assert_same(row: Row, expected_TV: torch.Tensor) -> None:
    for position, logits_V in row.logits.items():
        torch.testing.assert_close(logits_V, expected_TV[position - 1], atol=2e-4, rtol=1e-3)
        assert row.tokens[position] == expected_TV[position - 1].argmax()


@pytest.mark.parametrize("model", among(DENSE, SOME), indirect=True)
def test_bfloat16_errs_no_more_than_transformers(
    model: tuple[Path, Any], kernels_of: Callable[[str], NativeKernels]
) -> None:
    folder, reference = model
    rows = through_every_path(rig_of(folder, kernels_of(KERNELS[-1]), torch.bfloat16))
    assert_errs_no_more_than_in_bfloat16(rows, reference)
