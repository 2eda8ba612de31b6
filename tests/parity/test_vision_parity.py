"""Models that see on our decoder and paged cache against transformers: logits, greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_rig import Row
from support.vision_models import MODELS, pixels, save_model
from support.vision_rig import Part, VisionRig, VisionRow, generate

NUM_TOKENS = 4
LARGE, TALL, SMALL = pixels(40, 60, 1), pixels(90, 30, 2), pixels(20, 24, 3)
HELLO, THEN, WHAT = (1, 5, 9, 12), (13, 14), (20, 21, 22)


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, folder), folder


@pytest.fixture
def rig(loaded: tuple[Any, Path]) -> VisionRig:
    return VisionRig(loaded[1])


@pytest.fixture
def check(loaded: tuple[Any, Path], rig: VisionRig) -> Any:
    def equals_transformers(row: Row, *parts: Part) -> None:
        ids, logits_NV = generate(*loaded, rig, parts, NUM_TOKENS)
        ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
        torch.testing.assert_close(ours_NV, logits_NV, atol=1e-4, rtol=1e-4)
        assert row.tokens[row.num_prompt_tokens :] == ids

    return equals_transformers


def next_chunk(rig: VisionRig, row: VisionRow, size: int) -> int:
    """As many tokens, or what cannot be cut."""
    start, spans = row.num_cached, [image.span for image in row.images]
    end = min(start + size, row.num_prompt_tokens)
    return rig.limits.chunk_end(spans, row.num_prompt_tokens, range(start, end)) - start


def run(rig: VisionRig, row: VisionRow, chunk: int = 1000) -> VisionRow:
    while row.num_cached < row.num_prompt_tokens:
        rig.step((row, next_chunk(rig, row, chunk)))
    rig.decode(row, num_steps=NUM_TOKENS - 1)
    return row


def test_chunks_that_end_inside_images(rig: VisionRig, check: Any) -> None:
    parts = (HELLO, LARGE, THEN, TALL, WHAT)
    check(run(rig, rig.look(*parts), chunk=3), *parts)


def test_rows_with_images_of_many_sizes_and_text_in_one_batch(rig: VisionRig, check: Any) -> None:
    prompts: tuple[tuple[Part, ...], ...] = ((HELLO, LARGE, WHAT), (SMALL, THEN, TALL, WHAT))
    if not rig.limits.whole_prompts:
        prompts += ((HELLO,),)
    rows = [rig.look(*parts) for parts in prompts]
    rig.prefill(*rows)
    rig.decode(*rows, num_steps=NUM_TOKENS - 1)
    for row, parts in zip(rows, prompts, strict=True):
        check(row, *parts)


def test_decoding_with_a_prompt_with_an_image(rig: VisionRig, check: Any) -> None:
    first, parts = rig.look(HELLO, SMALL, WHAT), (HELLO, LARGE, WHAT)
    rig.prefill(first)
    second = rig.look(*parts)
    rig.step((first, 0), (second, next_chunk(rig, second, 9)))
    rig.step((first, 0), (second, second.num_prompt_tokens - second.num_cached or 0))
    rig.decode(first, second)
    rig.decode(second, num_steps=NUM_TOKENS - len(second.logits))
    check(first, HELLO, SMALL, WHAT)
    check(second, *parts)


def test_a_second_turn_finds_the_first(rig: VisionRig, check: Any) -> None:
    if rig.limits.whole_prompts or rig.kv.states is not None:
        pytest.skip("a longer prompt is another from its first position on, or hits are snapshots")
    turn = (HELLO, LARGE, WHAT)
    first, second = rig.look(*turn), rig.look(*turn, THEN, SMALL, WHAT)
    run(rig, first)
    rig.share(second, first, first.num_prompt_tokens // 4)
    check(run(rig, second), *turn, THEN, SMALL, WHAT)


def test_a_hit_that_ends_inside_an_image(rig: VisionRig, check: Any) -> None:
    if rig.kv.states is not None:
        pytest.skip("hits end at a snapshot")
    parts = (HELLO, LARGE, WHAT)
    first, second = rig.look(*parts), rig.look(*parts)
    run(rig, first)
    rig.share(second, first, num_pages=2)
    check(run(rig, second), *parts)


def test_a_row_computed_again(rig: VisionRig, check: Any) -> None:
    parts = (HELLO, LARGE, WHAT)
    row = rig.look(*parts)
    rig.prefill(row)
    rig.decode(row)
    rig.preempt(row)
    rig.prefill(row)
    rig.decode(row, num_steps=NUM_TOKENS - 3)
    check(row, *parts)
