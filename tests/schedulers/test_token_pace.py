"""Prompts are cut by time."""

import math
import sys
from dataclasses import replace

from support.token_world import World

from triptych.core.sampling_params import SamplingParams
from triptych.core.tokens import TokenRequest
from triptych.schedulers.token_pace import ChunkPace


def test_first_chunk_on_an_unmeasured_device_is_small() -> None:
    pace = ChunkPace(0.1)
    assert pace.max_tokens == 128
    pace.observe(128, 0.256)
    assert pace.max_tokens == 50


def test_slow_and_fast_steps_are_averaged() -> None:
    pace = ChunkPace(0.1)
    pace.observe(100, 0.1)
    pace.observe(100, 0.2)
    assert pace.max_tokens == int(0.1 / 0.0013)


def test_short_and_unmeasured_steps_are_not_learned_from() -> None:
    pace = ChunkPace(0.1)
    pace.observe(4, 1.0)
    pace.observe(100, 0.0)
    assert pace.max_tokens == 128


def test_a_chunk_is_never_tiny_and_nothing_is_cut_where_no_time_is_set() -> None:
    pace = ChunkPace(0.1)
    pace.observe(128, 60.0)
    assert pace.max_tokens == 32
    unbounded = ChunkPace(0.0)
    unbounded.observe(128, 60.0)
    assert unbounded.max_tokens == sys.maxsize


def chunks_of(
    num_tokens: int, token_s: float, *, has_company: bool = True, **options: object
) -> list[int]:
    """Sizes of a prompt's chunks on a device that takes `token_s` for each token."""
    world = World(num_pages=256, max_length=1000, max_batch_input_tokens=512, **options)
    world.scheduler.set_gap(0.05 if has_company else math.inf)
    sampling = SamplingParams(max_tokens=1)
    world.submit("a", TokenRequest(prompt_ids=tuple(range(num_tokens)), sampling=sampling))
    sizes = []
    while plan := world.book():
        sizes.append(plan.num_tokens)
        _, result = world.in_flight.pop()
        world.in_flight.append((plan, replace(result, elapsed_s=token_s * plan.num_tokens)))
        world.commit()
    return sizes


def test_prompt_is_cut_so_that_no_step_is_long() -> None:
    assert chunks_of(900, 1e-3, max_step_s=0.2) == [128, 200, 200, 200, 172]


def test_prompt_of_the_only_model_at_work_is_cut_by_tokens_alone() -> None:
    assert chunks_of(900, 1e-3, max_step_s=0.2, has_company=False) == [512, 388]


def test_fast_device_is_bounded_by_tokens_alone() -> None:
    assert chunks_of(900, 1e-6, max_step_s=0.2) == [128, 512, 260]
    assert chunks_of(900, 1e-3, max_step_s=0.0) == [512, 388]


def test_prompts_that_must_stay_whole_do() -> None:
    assert chunks_of(900, 1e-3, max_step_s=0.2, enable_chunked_prefill=False) == [900]
