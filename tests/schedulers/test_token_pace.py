"""Prompts are cut by time."""

import math
from dataclasses import replace

from support.token_world import World
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.schedulers.cost import CostModel


def learned(*steps: tuple[int, float]) -> CostModel:
    """After steps of so many tokens, and so many seconds."""
    costs = CostModel()
    for num_tokens, seconds in steps:
        costs.observe("prefill", {"tokens": num_tokens}, seconds)
    return costs


def test_first_chunk_on_an_unmeasured_device_is_small() -> None:
    assert learned().work_within("prefill", "tokens", 0.1, 2048) == 128
    assert learned((128, 0.256)).work_within("prefill", "tokens", 0.1, 2048) == 50


def test_beyond_what_was_seen_time_is_in_proportion() -> None:
    assert learned((100, 0.1)).work_within("prefill", "tokens", 0.2, 2048) == 200
    assert learned((100, 0.1)).work_within("prefill", "tokens", 0.2, 150) == 150


def test_what_a_step_takes_by_itself_is_learned_from_steps_of_many_sizes() -> None:
    """100 ms for each step and 1 ms for each token: larger chunks are cheaper by the token."""
    costs = learned(*((size, 0.1 + 0.001 * size) for size in (100, 400, 250, 300, 150, 350)))
    assert abs(costs.work_within("prefill", "tokens", 0.3, 2048) - 200) <= 10


def test_unmeasured_steps_are_not_learned_from() -> None:
    assert learned((100, 0.0)).work_within("prefill", "tokens", 0.1, 2048) == 128


def test_a_chunk_is_never_tiny() -> None:
    assert learned((128, 60.0)).work_within("prefill", "tokens", 0.1, 2048) == 32


def chunks_of(
    num_tokens: int, token_s: float, *, budget_s: float = 0.2, **options: object
) -> list[int]:
    """Sizes of a prompt's chunks on a device that takes `token_s` for each token."""
    world = World(num_pages=256, max_length=1000, max_batch_input_tokens=512, **options)
    world.scheduler.set_step_budget(budget_s)
    sampling = SamplingParams(max_tokens=1)
    world.submit("a", TokenRequest(prompt_ids=tuple(range(num_tokens)), sampling=sampling))
    sizes = []
    while size := timed_step(world, token_s):
        sizes.append(size)
    return sizes


def timed_step(world: World, token_s: float) -> int:
    """The tokens of the next step, which takes `token_s` for each; 0 if there is none."""
    plan = world.book()
    if plan is None:
        return 0
    _, result = world.in_flight.pop()
    world.in_flight.append((plan, replace(result, elapsed_s=token_s * plan.num_tokens)))
    world.commit()
    return plan.num_tokens


def test_prompt_is_cut_so_that_no_step_is_long() -> None:
    assert chunks_of(900, 1e-3) == [128, 200, 200, 200, 172]


def test_prompt_of_the_only_model_at_work_leaves_other_prompts_their_first_token() -> None:
    assert chunks_of(900, 1e-3, budget_s=math.inf) == [128, 250, 250, 250, 22]
    assert chunks_of(900, 1e-3, budget_s=math.inf, target_first_token_s=8.0) == [128, 512, 260]
    assert chunks_of(900, 1e-3, budget_s=math.inf, max_step_s=0) == [512, 388]


def test_fast_device_is_bounded_by_tokens_alone() -> None:
    assert chunks_of(900, 1e-6) == [128, 512, 260]
    assert chunks_of(900, 1e-4, budget_s=math.inf) == [128, 512, 260]


def test_steps_are_cut_for_the_tokens_of_other_clients_only_while_there_are_any() -> None:
    world = World(num_pages=256, max_length=1000, max_batch_input_tokens=512, max_step_s=0.1)
    sizes = {}
    for name, num_tokens, max_tokens in (("a", 900, 1), ("b", 900, 1), ("c", 1, 40)):
        prompt = tuple((ord(name) * 7 + i) % 4000 for i in range(num_tokens))
        request = TokenRequest(prompt_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))
        world.submit(name, request, client=name)
        for _ in range(2):  # the first is of the size that was right before
            sizes[name] = timed_step(world, 1e-3)
    assert sizes["b"] == 250
    assert sizes["c"] == 100 + 1


def test_prompts_that_must_stay_whole_do() -> None:
    assert chunks_of(900, 1e-3, enable_chunked_prefill=False) == [900]
