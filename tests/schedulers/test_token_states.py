"""Rows with recurrent states: where they are saved, and what later rows find."""

from typing import Any

import pytest

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


@pytest.mark.parametrize("num_snapshots", [16, 1])
def test_a_shared_beginning_is_found_once_it_is_known(num_snapshots: int) -> None:
    at = world(num_snapshots=num_snapshots)
    prompts = [SYSTEM + (30 + n,) * 9 for n in range(4)]
    assert [ask(at, f"{n}", prompt) for n, prompt in enumerate(prompts)] == [0, 0, 12, 12]


@pytest.mark.parametrize("max_batch_input_tokens", [88, 512, 1024])
def test_the_second_prompt_finds_most_of_a_long_beginning(max_batch_input_tokens: int) -> None:
    at = world(num_pages=600, max_length=800, max_batch_input_tokens=max_batch_input_tokens)
    prompts = [SYSTEM * 50 + (30 + n,) * 90 for n in range(3)]
    found = [ask(at, f"{n}", prompt) for n, prompt in enumerate(prompts)]
    assert found == [0, 512, 600]


def test_spares_of_a_step_leave_what_others_found_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.schedulers.tokens.state_saves._LEAST_SPARE_TOKENS", 4)
    at = world(num_snapshots=8, max_batch_input_tokens=512)
    assert [ask(at, name, SYSTEM) for name in "ab"] == [0, 8]
    for number in range(2):
        at.submit(f"{number}", token_request((20 + number,) * 60, max_tokens=1))
    plan = at.book()
    assert plan is not None
    assert len(plan.rows) == 2  # type: ignore[attr-defined]
    at.run()
    assert ask(at, "c", SYSTEM) == 8


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
    assert len(snapshots) == 2  # of its prompt, and of its answer
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


def run_on_a_device_for(at: World, num_tokens: int) -> None:
    """Run all jobs on a device that has no room for steps of more tokens."""
    for _ in range(1000):
        while len(at.in_flight) < at.depth and at.book():
            pass
        if not at.in_flight:
            return
        plan = at.in_flight[0][0]
        if sum(row.num_tokens for row in plan.rows) > num_tokens:
            at.fail(OutOfMemory("full"))
        else:
            at.commit()
        at.check()
    raise AssertionError("the steps do not end")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_snapshots", [0, 16])
def test_rows_begin_again_one_at_a_time_until_all_are_done(depth: int, num_snapshots: int) -> None:
    at = world(depth=depth, num_snapshots=num_snapshots, max_batch_input_tokens=24)
    for name in "abc":
        at.submit(name, token_request((int(name, 16),) * 16, max_tokens=9))
    run_on_a_device_for(at, 16)
    at.finish_all()
    assert all(at.outputs.final(name).error is None for name in "abc")
    assert at.scheduler.stats().counters["preemptions_total"] > 0


def test_a_row_without_room_fails_alone() -> None:
    """The first step fails as it is too large; half as many tokens are not."""
    at = world()
    at.submit("a", token_request((1,) * 16, max_tokens=4))
    at.submit("b", token_request((2,) * 16, max_tokens=4))
    at.book()
    at.fail(OutOfMemory("full"))
    at.submit("c", token_request((3,) * 16, max_tokens=4))
    at.book()
    at.fail(OutOfMemory("full"))  # of the first alone
    at.finish_all()
    errors = {name: at.outputs.final(name).error for name in "abc"}
    assert [name for name, error in errors.items() if error] == ["a"]
