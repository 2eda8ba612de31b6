"""What a step is made of: budgets, chunks, mixing, turns in the queue."""

from support.token_steps import prompt, step
from support.token_world import World, token_request


def test_a_long_prompt_is_split_and_answers_only_at_its_end() -> None:
    world = World(max_batch_input_tokens=8)
    world.submit("a", token_request(prompt(20), max_tokens=2))
    assert [step(world) for _ in range(3)] == [[("a", 8)], [("a", 8)], [("a", 4)]]
    assert len(world.deltas("a")) == 1


def test_a_long_prompt_leaves_room_for_shorter_ones() -> None:
    world = World(max_batch_input_tokens=8)
    for index, length in enumerate((3, 10, 3)):
        world.submit(f"{index}", token_request(prompt(length, index), max_tokens=1))
    assert step(world) == [("0", 3), ("1", 4), ("2", 1)]
    assert step(world) == [("1", 6), ("2", 2)]


def test_without_chunks_the_budget_is_soft_for_the_first_prompt_only() -> None:
    world = World(max_batch_input_tokens=8, enable_chunked_prefill=False)
    for index, length in enumerate((20, 3, 5, 1)):
        world.submit(f"{index}", token_request(prompt(length, index), max_tokens=1))
    assert step(world) == [("0", 20)]
    assert step(world) == [("1", 3), ("2", 5)]
    assert step(world) == [("3", 1)]


def test_decodes_go_first_and_prompts_get_their_share_of_the_step() -> None:
    world = World(max_batch_input_tokens=16, max_prompt_share=0.25)
    world.submit("a", token_request(prompt(3), max_tokens=20))
    step(world)
    world.submit("b", token_request(prompt(12, 1), max_tokens=2))
    assert [step(world) for _ in range(4)] == [[("a", 1), ("b", 4)]] * 3 + [[("a", 1), ("b", 1)]]


def test_long_answers_leave_half_of_a_step_to_prompts() -> None:
    world = World(max_batch_input_tokens=4, max_batch_size=8, num_pages=64)
    for index in range(8):
        world.submit(f"{index}", token_request((index,), max_tokens=30))
    plans = [step(world) for _ in range(6)]
    assert max(map(len, plans)) == 2
    world.finish_all()


def test_a_budget_of_one_token_still_works() -> None:
    world = World(max_batch_input_tokens=1)
    world.submit("a", token_request(prompt(3), max_tokens=3))
    world.submit("b", token_request(prompt(3, 1), max_tokens=3))
    world.finish_all()


def test_out_of_flight_prompts_drain_first() -> None:
    world = World(max_batch_input_tokens=8, enable_in_flight_batching=False)
    world.submit("a", token_request(prompt(3), max_tokens=20))
    step(world)
    world.submit("b", token_request(prompt(12, 1), max_tokens=20))
    assert step(world) == [("b", 8)]
    assert step(world) == [("b", 4)]
    assert step(world) == [("a", 1), ("b", 1)]
    world.finish_all()


def test_max_batch_size_bounds_rows() -> None:
    world = World(max_batch_size=2)
    for name in "abc":
        world.submit(name, token_request((ord(name), 1), max_tokens=3))
    assert step(world) == [("a", 2), ("b", 2)]
    assert step(world) == [("a", 1), ("b", 1)]
    world.finish_all()


def test_context_is_charged_in_pages_and_equality_closes_the_step() -> None:
    world = World(max_batch_total_tokens=16, num_pages=40)
    for index, length in enumerate((5, 7, 1)):  # 8 + 8 fill it, page size 4
        world.submit(f"{index}", token_request(prompt(length, index), max_tokens=1))
    assert step(world) == [("0", 5), ("1", 7)]
    assert step(world) == [("2", 1)]


def test_context_is_charged_whole_however_small_the_chunk() -> None:
    world = World(max_batch_total_tokens=20, max_batch_input_tokens=4, num_pages=40)
    world.submit("a", token_request(prompt(2), max_tokens=3))
    world.submit("b", token_request(prompt(20, 1), max_tokens=1))
    assert step(world) == [("a", 2)]
    assert step(world) == [("a", 1)]
    assert step(world) == [("a", 1)]
    assert step(world) == [("b", 4)]
    world.finish_all()


def test_context_is_not_charged_without_prompts() -> None:
    world = World(max_batch_total_tokens=8, num_pages=40)
    world.submit("a", token_request(prompt(3), max_tokens=15))
    world.submit("b", token_request(prompt(3, 1), max_tokens=15))
    assert step(world) == [("a", 3), ("b", 3)]
    for _ in range(14):
        assert step(world) == [("a", 1), ("b", 1)]


def test_a_prompt_begun_waits_while_contexts_are_too_long_and_then_goes_on() -> None:
    world = World(max_batch_total_tokens=16, max_batch_input_tokens=8, num_pages=40)
    world.submit("a", token_request(prompt(4), max_tokens=6))
    step(world)
    world.submit("b", token_request(prompt(8, 1), max_tokens=1))
    assert step(world) == [("a", 1), ("b", 4)]
    plans = [step(world) for _ in range(6)]
    assert [("b", 4)] in plans or [("a", 1), ("b", 4)] in plans
    world.finish_all()


def test_a_resumed_row_that_outgrew_the_context_bound_runs_alone() -> None:
    world = World(max_batch_total_tokens=16, num_pages=12, kvcache_ce_watermark=1.0)
    for index in range(2):
        world.submit(f"{index}", token_request(prompt(8, index), max_tokens=24))
    world.finish_all()
    assert world.scheduler.stats().counters["preemptions_total"] > 0


def test_first_come_first_served_by_default() -> None:
    world = World(max_batch_size=1)
    for name, priority in (("a", 0), ("b", 5)):
        world.submit(name, token_request((1, 2), max_tokens=1, priority=priority))
    assert step(world) == [("a", 2)]


def test_the_highest_priority_goes_first_and_equals_as_they_came() -> None:
    world = World(max_batch_size=1, schedule_policy="priority")
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        request = token_request((ord(name), 2), max_tokens=1, priority=priority)
        world.submit(name, request)
    assert [step(world)[0][0] for _ in range(4)] == ["b", "c", "a", "d"]


def test_a_big_prompt_is_passed_only_so_often() -> None:
    world = World(num_pages=12, max_batch_size=3, max_queue_size=400)
    world.submit("long", token_request(prompt(8), max_tokens=36))
    step(world)
    world.submit("big", token_request(prompt(40, 1), max_tokens=2))
    for index in range(100):
        world.submit(f"{index}", token_request((2 + index % 20,), max_tokens=2))
    world.finish_all()
    order = sorted(world.jobs, key=lambda name: world.jobs[name].timings["scheduled_s"])
    assert 0 < order.index("big") - 1 <= 20


def test_looking_behind_prompts_without_room_is_bounded() -> None:
    world = World(num_pages=12, max_batch_size=4)
    world.submit("long", token_request(prompt(24), max_tokens=20))
    step(world)
    for index in range(10):
        world.submit(f"big-{index}", token_request(prompt(40, 1 + index), max_tokens=2))
    world.submit("small", token_request((49,), max_tokens=2))
    assert step(world) == [("long", 1)]
    world.finish_all()
