"""Rows that the owner of a token scheduler keeps out of a step."""

from support.token_world import World, token_request
from triptych.core.engine_api.plan import TokenPlan
from triptych.schedulers.tokens.state import TokenProgress
from triptych.schedulers.tokens.step import UNLIMITED, TokenLimits


def _world(*prompts: int, **options: object) -> World:
    """A world with a job per prompt length, `a`, `b` and so on."""
    world = World(num_pages=40, max_length=80, **options)
    for index, length in enumerate(prompts):
        prompt = tuple((index + 1) * (i + 1) % 50 for i in range(length))
        world.submit("abcdef"[index], token_request(prompt, max_tokens=12))
    return world


def _step(world: World, hold: TokenLimits) -> TokenPlan | None:
    """One step with `hold`, over before this returns."""
    world.scheduler.limits = hold
    proposal = world.scheduler.propose(world.now_s)
    if proposal is None:
        return None
    plan = world.scheduler.book(proposal, world.num_steps, world.now_s)
    assert isinstance(plan, TokenPlan)
    world.num_steps += 1
    world.in_flight.append((plan, world.runner.run(plan)))
    world.commit()
    world.check()
    world.scheduler.limits = UNLIMITED
    return plan


def _progress(world: World, job_id: str) -> TokenProgress:
    return world.scheduler.tokens.progress(world.scheduler._jobs[job_id])


def _jobs(plan: TokenPlan | None) -> list[str]:
    return [] if plan is None else [row.job_id for row in plan.rows]


def test_held_rows_stand_still_and_lose_nothing() -> None:
    world = _world(5, 5, 5)
    world.turn()
    world.turn()
    world.commit()
    hold = TokenLimits(frozenset("b"))
    assert all(_jobs(_step(world, hold)) == ["a", "c"] for _ in range(3))
    assert _progress(world, "b").num_outputs < _progress(world, "a").num_outputs
    world.finish_all()


def test_a_waiting_job_is_held_without_blocking_those_behind_it() -> None:
    world = _world(5, 5)
    assert _jobs(_step(world, TokenLimits(frozenset("a")))) == ["b"]
    assert _progress(world, "a").is_waiting
    assert set(_jobs(_step(world, TokenLimits()))) == {"a", "b"}
    world.finish_all()


def test_prompts_take_no_more_than_they_may() -> None:
    world = _world(3, 20, max_batch_input_tokens=32)
    _step(world, TokenLimits(frozenset("b")))
    for allowed in (4, 6):
        plan = _step(world, TokenLimits(max_prompt_tokens=allowed))
        assert plan is not None
        assert [row.num_tokens for row in plan.rows] == [1, allowed]
    assert _jobs(_step(world, TokenLimits(max_prompt_tokens=0))) == ["a"]
    assert _progress(world, "b").num_left == 10
    world.finish_all()


def test_no_row_waits_for_a_page_that_a_held_row_would_compute() -> None:
    world = World(num_pages=40, max_length=80, max_batch_input_tokens=4)
    prompt = (7,) * 20
    world.submit("a", token_request(prompt, max_tokens=4))
    world.submit("b", token_request(prompt, max_tokens=4))
    assert _jobs(_step(world, TokenLimits())) == ["a"]
    assert _jobs(_step(world, TokenLimits())) == ["a"], "b waits for what a computes"
    assert _jobs(_step(world, TokenLimits(frozenset("a")))) == ["b"]
    world.finish_all()


def test_a_stale_proposal_keeps_its_hold() -> None:
    world = _world(5, 5)
    world.scheduler.limits = TokenLimits(frozenset("a"))
    proposal = world.scheduler.propose(0.0)
    assert proposal is not None
    world.submit("c", token_request((1, 2, 3), max_tokens=3))
    plan = world.scheduler.book(proposal, world.num_steps, 0.0)
    assert isinstance(plan, TokenPlan)
    assert _jobs(plan) == ["b", "c"]
    world.num_steps += 1
    world.in_flight.append((plan, world.runner.run(plan)))
    world.scheduler.limits = UNLIMITED
    world.finish_all()


def test_progress_counts_what_is_cached_and_in_flight() -> None:
    world = _world(9)
    assert _progress(world, "a") == (9, 0, True, True, False)
    world.book()
    assert _progress(world, "a") == (1, 1, True, False, True)
    world.commit()
    prompt = world.requests["a"].prompt_ids
    world.submit("z", token_request(prompt, max_tokens=2))
    assert _progress(world, "z").num_left == 1, "two pages of four are found"
    world.finish_all()


def test_a_prompt_that_lacks_pages_of_windows_is_overtaken_so_often_only() -> None:
    world = World(
        num_pages=400,
        page_size=4,
        max_length=64,
        depth=3,
        window=2,
        num_window_rows=3,
        max_batch_size=3,
        max_batch_input_tokens=32,
        enable_chunked_prefill=False,
        max_queue_size=200,
    )
    for turn in range(60):
        prompt = tuple((turn * 7 + n * n) % 50 for n in range(40))
        world.submit(f"short-{turn}", token_request(prompt, max_tokens=3))
        if turn == 4:
            world.submit("long", token_request(tuple(range(60)), max_tokens=2))
        world.turn()
    assert world.jobs["long"].state.is_final
    world.finish_all()
