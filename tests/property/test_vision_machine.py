"""Prompts with images live at random: nothing is shared that differs, lost or leaked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.image_link import FetchingDriver, HandImages
from support.vision_world import VisionWorld, live, random_vision_world, see

PARTS = st.lists(
    st.integers(1, 6) | st.tuples(st.sampled_from("abc"), st.sampled_from((1, 2, 5, 8))),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules_of_chats_with_images(seed: int) -> None:
    world = live(seed, 120)
    for job_id in world.jobs:
        got_ids = world.output_ids(job_id)
        if job_id not in world.runner.bad_jobs:
            assert got_ids == world.answer(job_id)[: len(got_ids)]


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules_of_images_that_come_from_elsewhere(seed: int) -> None:
    rng = random.Random(seed)
    world = random_vision_world(rng)
    link = HandImages(world, capacity_bytes=rng.choice((8, 1000)))
    driver = FetchingDriver(world, rng, link)
    for _ in range(150):
        driver.act()
    driver.finish()
    for job_id in world.jobs:
        got_ids = world.output_ids(job_id)
        if job_id not in world.runner.bad_jobs:
            assert got_ids == world.answer(job_id)[: len(got_ids)]


@settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, min_size=2, max_size=4))
def test_images_behind_equal_ids_never_share_a_page(prompts: list[list[object]]) -> None:
    """All image positions have one id: pages differ by the images' digests alone."""
    world = VisionWorld(num_pages=120, page_size=4, max_length=64, max_entries=2)
    for index, parts in enumerate(prompts):
        world.submit(str(index), see(*parts, 1, max_tokens=3))
        if index % 2:
            world.run()
    world.finish_all()
    for job_id in world.jobs:
        assert world.output_ids(job_id) == world.answer(job_id)
