"""Ranks that encode together and lack memory: they refuse alike, and go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from support.decoder_rig import CPU
from support.rank_threads import PlanQueue, lead_and_follow
from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.errors import OutOfMemory
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.devices.stream import StepStream
from triptych.core.runtime.engine.ranks import LeadingRunner
from triptych.modalities.vlm.engine.encoder import Features, ImageEncoder, open_cache
from triptych.modalities.vlm.engine.memory_check import SharedMemoryCheck
from triptych.modalities.vlm.engine.runner import VisionRunner, plan_message
from triptych.modalities.vlm.plan import EncodePlan, SharedPlan

PATCH_BYTES, RESERVED, PATCH_VALUES = 1000, 10, 14 * 14 * 3


class FakeDevice:
    """A CPU that so much can be had of; `None`: nobody may ask."""

    is_cpu, torch = True, CPU

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes

    def obtainable_bytes(self) -> int:
        assert self._num_bytes is not None, "there was no reason to ask"
        return self._num_bytes


class SummingEncoder:
    """Ranks meet in it, as they do in a divided tower."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def encode(self, images: Sequence[PromptContent]) -> list[Features]:
        return [Features(self._group.sum(torch.ones(1, 2))) for _ in images]


def image(number: int, num_patches: int) -> PromptContent:
    values = Array(dtype="uint8", shape=(num_patches, PATCH_VALUES), data=b"")
    span = ContentSpan(digest=bytes([number]), runs=((0, 1),))
    return PromptContent(span=span, inputs={"pixel_values": values})


def runner_of(group: RankGroup, num_bytes: int | None) -> VisionRunner:
    encoder: Any = SummingEncoder(group)
    cache = open_cache(2**20, 9)
    tokens: Any = None
    runner = VisionRunner(tokens, cast("ImageEncoder", encoder), cache, CPU, StepStream(CPU))
    runner.memory_check = SharedMemoryCheck(
        group=group,
        device=cast("Device", FakeDevice(num_bytes)),
        patch_bytes=PATCH_BYTES,
        reserved_patches=RESERVED,
    )
    return runner


def encode(on_rank: Sequence[int | None], *nums_patches: int) -> list[bool]:
    """Whether images of so many patches were encoded, one after the other."""

    def lead(ranks: PlanQueue) -> list[bool]:
        runner = LeadingRunner(runner_of(ranks.group, on_rank[0]), cast("Any", ranks), plan_message)
        found = []
        for step, num_patches in enumerate(nums_patches):
            images = (image(step, num_patches),)
            plan = EncodePlan(step_id=step, model="m", kind="encode", images=images)
            pending = runner.launch(plan)
            try:
                found.append(pending.result().rows == [None])
            except OutOfMemory:
                found.append(False)
        return found

    def follow(group: RankGroup) -> VisionRunner:
        return runner_of(group, on_rank[group.rank])

    return lead_and_follow(len(on_rank), lead, follow, SharedPlan)


@pytest.mark.parametrize("short", [0, 1])
def test_where_one_rank_lacks_room_all_refuse_and_go_on(short: int) -> None:
    """They share the memory of one CPU: twenty patches take that of forty."""
    on_rank = [2**20, 2**20]
    on_rank[short] = 2 * 20 * PATCH_BYTES - 1
    assert encode(on_rank, 8, 20, 19, 8) == [True, False, True, True]


def test_steps_that_hold_their_memory_reserve_none() -> None:
    assert encode([None, None], RESERVED, 1) == [True, True]
