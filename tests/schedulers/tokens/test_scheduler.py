"""The life of token jobs: answers, endings, what is sent and when."""

from typing import Any

import pytest

from support.token_world import World, expected_answer, token_request
from triptych.core.engine_api.job import JobState
from triptych.core.errors import ContextLengthExceeded, InvalidRequest, Overloaded


def test_a_prompt_is_answered_token_by_token() -> None:
    world = World()
    job = world.submit("a", token_request((1, 2, 3, 4, 5), max_tokens=6))
    world.finish_all()
    deltas = world.deltas("a")
    assert [len(delta.token_ids) for delta in deltas] == [1] * 6
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]
    assert job.state is JobState.FINISHED
    assert set(job.timings) == {"scheduled_s", "first_token_s"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_ends_the_answer_and_is_not_in_it(depth: int) -> None:
    request = token_request((1, 2, 3), max_tokens=30)
    ids, _ = expected_answer(request, 48)
    stop = ids[5]
    world = World(depth=depth)
    world.submit("a", token_request((1, 2, 3), max_tokens=30, stop_token_ids=(stop,)))
    world.finish_all()
    last = world.deltas("a")[-1]
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ((), "stop", stop)
    assert world.output_ids("a") == ids[: ids.index(stop)]


def test_every_token_that_was_sampled_has_its_log_probability() -> None:
    """That which ended the answer, too: it is counted, and may be asked for."""
    ids, _ = expected_answer(token_request((1, 2, 3), max_tokens=30), 48)
    world = World()
    world.submit(
        "a", token_request((1, 2, 3), max_tokens=30, stop_token_ids=(ids[5],), top_logprobs=0)
    )
    world.finish_all()
    scored = [entry.token_id for delta in world.deltas("a") for entry in delta.logprobs]
    assert scored == [*world.output_ids("a"), ids[5]]


def test_a_stop_token_before_min_tokens_is_an_ordinary_one() -> None:
    ids, _ = expected_answer(token_request((1, 2, 3), max_tokens=12), 48)
    world = World()
    request = token_request((1, 2, 3), max_tokens=12, min_tokens=4, stop_token_ids=(ids[0], ids[4]))
    world.submit("a", request)
    world.finish_all()
    assert world.output_ids("a")[:4] == ids[:4]
    assert world.deltas("a")[-1].finish_reason == "stop"


def test_the_context_ends_an_answer_too() -> None:
    world = World(max_length=10)
    world.submit("a", token_request((1, 2, 3), max_tokens=1000))
    world.finish_all()
    assert len(world.output_ids("a")) == 7


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_computed_beyond_the_last_token(depth: int) -> None:
    world = World(depth=depth)
    world.submit("a", token_request((1, 2, 3), max_tokens=5))
    world.finish_all()
    assert world.runner.num_computed_tokens == 3 + 4


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "options", "error", "words"),
    [
        ((), 1, {}, InvalidRequest, "empty"),
        (tuple(range(48)), 1, {}, ContextLengthExceeded, "48 tokens"),
        ((1,) * 20, 40, {"num_pages": 8}, ContextLengthExceeded, "holds 32"),
        ((1,) * 17, 1, {"max_batch_total_tokens": 19}, ContextLengthExceeded, "allows 19"),
    ],
)
def test_what_can_never_run_is_refused_with_the_limit(
    prompt: tuple[int, ...],
    max_tokens: int,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    world = World(**options)
    refusal = world.submit("a", token_request(prompt, max_tokens=max_tokens))
    assert isinstance(refusal, error)
    assert words in str(refusal)
    world.finish_all()


def test_what_just_fits_the_pool_runs() -> None:
    world = World(num_pages=8)
    world.submit("a", token_request((1,) * 20, max_tokens=13))
    world.finish_all()
    assert len(world.output_ids("a")) == 13


def test_a_full_queue_refuses() -> None:
    world = World(max_queue_size=2, max_batch_size=1)
    answers = [world.submit(f"{i}", token_request((i,), max_tokens=2)) for i in range(4)]
    assert isinstance(answers[3], Overloaded)
    assert answers[3].retry_after_s == 1.0
    world.finish_all()
    assert len(world.jobs) == 3


def test_prompt_logprobs_come_once_with_the_first_token() -> None:
    world = World(max_batch_input_tokens=4)
    prompt = tuple(range(11))
    world.submit("warm", token_request(prompt, max_tokens=1))
    world.run()
    world.submit("a", token_request(prompt, max_tokens=3, prompt_logprobs=True))
    world.finish_all()
    first, *rest = world.deltas("a")
    assert [entry.token_id for entry in first.prompt_logprobs] == list(prompt[1:])
    assert not any(delta.prompt_logprobs for delta in rest)
    assert first.num_cached_tokens == 0


def test_paused_jobs_are_left_out_wherever_they_are() -> None:
    world = World(max_batch_size=2)
    for name in ("a", "b"):
        world.submit(name, token_request((1, 2, 3), max_tokens=8))
    world.turn()
    world.scheduler.set_paused("a", True)
    world.submit("c", token_request((4, 5), max_tokens=2))
    world.scheduler.set_paused("c", True)
    world.scheduler.set_paused("c", True)
    world.run()
    assert world.scheduler.stats().gauges["jobs_paused"] == 2
    assert [len(world.output_ids(name)) for name in "abc"] == [1, 8, 0]
    world.finish_all()


def test_a_job_may_arrive_paused() -> None:
    world = World()
    job = world.submit("a", token_request((1, 2), max_tokens=2))
    world.scheduler.cancel("a")
    job.state, job.is_paused, world.outputs["a"][:] = JobState.WAITING, True, []
    world.scheduler.submit(job)
    world.run()
    assert not world.outputs["a"]
    world.finish_all()


def test_unknown_jobs_are_ignored() -> None:
    world = World()
    world.scheduler.cancel("nobody")
    world.scheduler.set_paused("nobody", True)
    assert world.scheduler.propose(0.0) is None


def test_proposing_changes_nothing_and_repeats_itself() -> None:
    world = World(max_batch_size=3)
    for name in "abcd":
        world.submit(name, token_request((1, 2, 3), max_tokens=4))
    for _ in range(4):
        one, other = world.scheduler.propose(1.0), world.scheduler.propose(1.0)
        assert one is not None
        assert other is not None
        assert (one.work, len(one.rows), one.due_s) == (
            other.work,
            len(other.rows),
            other.due_s,
        )
        world.check()
        world.turn()
    world.finish_all()


def test_stale_proposal_is_rebuilt_on_booking() -> None:
    world = World()
    world.submit("a", token_request((1, 2, 3), max_tokens=4))
    world.submit("b", token_request((4, 5, 6), max_tokens=4))
    proposal = world.scheduler.propose(0.0)
    world.scheduler.cancel("a")
    plan = world.scheduler.book(proposal, 0, 0.0)
    assert [row.job_id for row in plan.rows] == ["b"]
    world.in_flight.append((plan, world.runner.run(plan)))
    world.finish_all()


def test_nothing_is_booked_when_nothing_is_left() -> None:
    world = World()
    world.submit("a", token_request((1, 2, 3), max_tokens=4))
    proposal = world.scheduler.propose(0.0)
    world.scheduler.cancel("a")
    assert world.scheduler.book(proposal, 0, 0.0) is None


def test_proposals_carry_work_and_due_time() -> None:
    world = World(max_batch_size=2, target_first_token_s=2.0, target_inter_token_s=0.25)
    world.submit("a", token_request((1, 2, 3, 4, 5), max_tokens=9))
    proposal = world.scheduler.propose(0.0)
    assert proposal.due_s == 2.0
    assert proposal.kind == "prefill"
    assert proposal.work == {"decode_rows": 0, "prompt_tokens": 5, "context_tokens": 5}
    world.turn()
    proposal = world.scheduler.propose(0.0)
    assert proposal.due_s == pytest.approx(world.now_s + 0.25)
    assert proposal.kind == "decode"
    assert proposal.work == {"decode_rows": 1, "prompt_tokens": 0, "context_tokens": 6}
    world.submit("b", token_request((1, 2), max_tokens=9))
    assert world.scheduler.propose(0.0).kind == "mixed"
    world.finish_all()


def test_many_overlap() -> None:
    world = World(depth=2, num_pages=14, max_batch_size=6, max_batch_input_tokens=12)
    for index in range(40):
        prompt = tuple((index // 4 + i) % 20 for i in range(1 + index % 19))
        world.submit(f"{index}", token_request(prompt, max_tokens=1 + index % 23))
    world.finish_all()
    assert world.scheduler.stats().counters["preemptions_total"] > 0
