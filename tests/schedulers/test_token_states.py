"""Rows with recurrent states: where they are saved, and what later rows find."""

from typing import Any

from support.token_world import World, token_request
from triptych.core.errors import OutOfMemory

SYSTEM = tuple(range(12))


def world(**options: Any) -> World:
    given = {"num_pages": 40, "page_size": 4, "num_snapshots": 16, "max_length": 64}
    return World(**(given | options))


def ask(at: World, name: str, prompt: tuple[int, ...], max_tokens: int = 1) -> int:
    """Run one prompt to its end; returns the number of its tokens that were cached."""
    at.submit(name, token_request(prompt, max_tokens=max_tokens))
    at.run()
    at.check()
    at.check_answer(name)
    return at.deltas(name)[-1].num_cached_tokens


def test_the_same_prompt_starts_after_its_last_page() -> None:
    at = world()
    assert [ask(at, name, SYSTEM) for name in "abc"] == [0, 8, 8]
    assert at.runner.num_computed_tokens == 12 + 4 + 4


def test_the_next_turn_computes_only_what_is_new() -> None:
    at = world()
    ask(at, "a", SYSTEM, max_tokens=11)
    turn = SYSTEM + at.output_ids("a") + (7, 7, 7)
    assert ask(at, "b", turn) == 20  # positions 0 .. 21 were computed
    assert ask(world(num_snapshots=1), "b", turn) == 0


def test_a_shared_beginning_is_found_once_it_is_known() -> None:
    at = world()
    prompts = [SYSTEM + (30 + n,) * 9 for n in range(4)]
    found = [ask(at, f"{n}", prompt) for n, prompt in enumerate(prompts)]
    assert found == [0, 0, 12, 12]


def test_equal_prompts_wait_for_one_of_them() -> None:
    at = world(max_batch_input_tokens=8)
    for name in "abc":
        at.submit(name, token_request(SYSTEM * 2, max_tokens=2))
    at.run()
    assert [at.deltas(name)[-1].num_cached_tokens for name in "abc"] == [0, 20, 20]


def test_a_prompt_asks_the_row_that_it_waits_for_to_save_its_state() -> None:
    at = world(max_batch_input_tokens=4)
    at.submit("a", token_request(SYSTEM + (30,) * 9, max_tokens=2))
    at.book()
    at.submit("b", token_request(SYSTEM + (31,) * 9, max_tokens=2))
    at.run()
    assert at.deltas("b")[-1].num_cached_tokens == 12


def test_a_row_keeps_one_snapshot_of_its_progress() -> None:
    at = world()
    snapshots = at.pool.snapshots
    assert snapshots is not None
    ask(at, "a", SYSTEM, max_tokens=40)
    assert len(snapshots) == 2  # of its prompt and of its answer
    assert ask(at, "b", SYSTEM + at.output_ids("a")) == 48


def test_a_row_that_others_found_keeps_what_they_found() -> None:
    at = world()
    ask(at, "a", SYSTEM, max_tokens=20)
    prefix = SYSTEM + at.output_ids("a")
    assert [ask(at, name, prefix, max_tokens=12) for name in "bc"] == [28, 28]


def test_progress_leaves_the_snapshots_of_prompts_alone_where_they_are_few() -> None:
    at = world(num_snapshots=1)
    ask(at, "a", SYSTEM, max_tokens=20)
    assert ask(at, "b", SYSTEM) == 8


def test_equal_rows_keep_the_snapshot_that_one_of_them_saved() -> None:
    """The progress of both is the same; it is not dropped with that of the other."""
    at = world(max_length=40)
    for name, num in (("a", 9), ("b", 13)):
        at.submit(name, token_request(SYSTEM, max_tokens=num, prompt_logprobs=True))
    at.run()
    turn = SYSTEM + at.output_ids("a")
    assert ask(at, "c", turn) == 20


def test_a_preempted_row_goes_on_at_its_last_snapshot() -> None:
    at = world(num_pages=9, max_batch_size=2)
    for name in "ab":
        at.submit(name, token_request((int(name, 16),) * 8, max_tokens=16))
    at.run()
    assert at.scheduler.stats().counters["preemptions_total"] > 0
    assert at.runner.states.num_restored > 0
    for name in "ab":
        at.check_answer(name)


def test_rows_that_ran_out_of_memory_begin_again_once() -> None:
    at = world(depth=2)
    for name in "ab":
        at.submit(name, token_request(SYSTEM + (int(name, 16),) * 4, max_tokens=20))
    for _ in range(6):
        at.turn()
    at.fail(OutOfMemory("full"))
    at.check()
    at.finish_all()
    assert at.deltas("a")[-1].num_preemptions == 1
    again = world()
    for name in "ab":
        again.submit(name, token_request(SYSTEM + (int(name, 16),) * 4, max_tokens=20))
    for _ in range(2):
        again.book()
        again.fail(OutOfMemory("full"))
    assert {again.outputs.final(name).error.code for name in "ab"} == {"out_of_memory"}
