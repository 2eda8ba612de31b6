"""Whole images on several ranks, and what becomes of them where memory is short."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from support.image_runner import CPU, RunnerDriver, image_request, open_executor
from support.rank_threads import PlanQueue, lead_and_follow
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import OutOfMemory, RankLost
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.core.runtime.engine.ranks import LeadingRunner
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.engine.parallel.division import Division, follower_plan
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.plan import DenoisePlan

ONE_AT_A_TIME = threading.Lock()
"""Random weights follow from the process's one seed."""


def on_two_ranks(
    pipeline: str, ulysses_degree: int, drive: Callable[[RunnerDriver], list[Pixels]]
) -> list[Pixels]:
    def part(group: RankGroup) -> tuple[ImageExecutor, DenoiseRunner]:
        division = Division.of(group, ulysses_degree)
        with ONE_AT_A_TIME:
            executor = open_executor(pipeline, division=division)
        return executor, DenoiseRunner(executor, CPU, is_divided=True)

    def lead(ranks: PlanQueue) -> list[Pixels]:
        executor, runner = part(ranks.group)
        return drive(RunnerDriver(executor, LeadingRunner(runner, ranks, follower_plan)))

    return lead_and_follow(2, lead, lambda group: part(group)[1], DenoisePlan)


def generate(driver: RunnerDriver) -> list[Pixels]:
    """Two images of one shape, and a third that begins from noise of its own."""
    asked = [image_request(num_steps=3, guidance_scale=3.0), image_request(num_steps=3, seed=8)]
    return driver.finish(driver.encode(*asked))


def closeness(first: Pixels, second: Pixels) -> int:
    ours, theirs = (np.frombuffer(each.rgb, np.uint8).astype(int) for each in (first, second))
    return int(np.abs(ours - theirs).max())


@pytest.mark.parametrize(
    "pipeline", ["QwenImagePipeline", "StableDiffusion3Pipeline", "WanPipeline"]
)
def test_images_of_divided_tokens_are_those_of_one_rank(pipeline: str) -> None:
    expected = generate(RunnerDriver(open_executor(pipeline)))
    found = on_two_ranks(pipeline, 2, generate)
    assert all(closeness(*pair) <= 1 for pair in zip(found, expected, strict=True))


def test_a_decoder_without_memory_ends_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(executor: ImageExecutor, images: object) -> None:
        raise torch.OutOfMemoryError("there is none left")

    def drive(driver: RunnerDriver) -> list[Pixels]:
        keys = driver.encode(image_request(), image_request(seed=8))
        driver.denoise(keys, num_steps=6)
        with monkeypatch.context() as patch:
            patch.setattr(ImageExecutor, "decode", short)
            with pytest.raises(OutOfMemory):
                driver.decode(keys)
        return [*driver.decode(keys[:1]), *driver.decode(keys[1:]), *generate(driver)]

    expected = drive(RunnerDriver(open_executor()))
    assert on_two_ranks("PixArtSigmaPipeline", 1, drive) == expected


def test_a_step_without_memory_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(executor: ImageExecutor, *args: object) -> None:
        raise torch.OutOfMemoryError("there is none left")

    def drive(driver: RunnerDriver) -> list[Pixels]:
        keys = driver.encode(image_request())
        monkeypatch.setattr(ImageExecutor, "advance", short)
        with pytest.raises(RankLost):
            driver.denoise(keys)
        return []

    with pytest.raises(OutOfMemory):  # the other rank's, which ends its process
        on_two_ranks("PixArtSigmaPipeline", 1, drive)
