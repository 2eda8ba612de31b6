"""Chats with images and without in one step: logits are bitwise those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.batch_driver import is_same
from support.decoder_rig import Row
from support.tiers import first
from support.vision_models import pixels, save_model
from support.vision_rig import VisionRig
from triptych.core.runtime.kernels.native.library import NativeKernels

NUM_TOKENS = 4
TEXT = tuple(range(3, 40))
SUN, MOON = pixels(40, 60, 1), pixels(20, 24, 2)


# Features that enter once, that enter again in later layers, that see each other, whole prompts.
@pytest.mark.parametrize(
    "dtype", first([torch.bfloat16, torch.float32]), ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize(
    "family", ["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "paligemma"]
)
def test_logits_are_the_same_alone_and_batched(
    kernels: NativeKernels,
    set_threads: Callable[[int], None],
    tmp_path: Path,
    family: str,
    dtype: torch.dtype,
) -> None:
    set_threads(1)
    save_model(family, tmp_path)
    rig = VisionRig(tmp_path, dtype=dtype, native=kernels)
    parts = ((TEXT,), ((1, 5), SUN, (20, 21)), (TEXT[5:16],), ((1, 9, 12), MOON, (6,)))
    alone = [rig.look(*prompt) for prompt in parts]
    for row in alone:
        rig.prefill(row)
        rig.decode(row, num_steps=NUM_TOKENS)

    first, second, third, fourth = batched = [rig.look(*prompt) for prompt in parts]
    for row, single in zip(batched, alone, strict=True):
        row.images = single.images
    rig.prefill(first, second)  # text beside an image
    rig.prefill(third)
    rig.step((first, 0), (third, 0), (fourth, len(fourth.tokens)))
    rig.decode(*batched[::-1], num_steps=NUM_TOKENS)
    assert_same(batched, alone)


def assert_same(batched: list[Row], alone: list[Row]) -> None:
    for index, (row, single) in enumerate(zip(batched, alone, strict=True)):
        for position in row.logits.keys() & single.logits.keys():
            ours, theirs = row.logits[position], single.logits[position]
            difference = (ours - theirs).abs().max().item()
            has_same_bits = is_same(ours, theirs)
            assert has_same_bits, f"row {index}, position {position}: {difference=}"
