"""Which images are encoded when, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from msgspec.structs import replace

from support.guided import VOCABULARY
from support.token_world import World, token_request
from support.vision_world import MEMORY_SHORT, VisionWorld, see
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.errors import InternalError, InvalidRequest
from triptych.core.grammar.source import to_grammar
from triptych.modalities.vlm.scheduling.prompts import VisionLimits
from triptych.schedulers.tokens.grammar_worker import GrammarWorker


def check_answers(world: VisionWorld, *job_ids: str) -> None:
    world.finish_all()
    for job_id in job_ids or world.jobs:
        assert world.output_ids(job_id) == world.answer(job_id)


def names(world: VisionWorld) -> int:
    return len(world.runner.encoded)


def test_text_goes_on_while_an_image_is_encoded() -> None:
    world = VisionWorld(num_pages=40)
    world.submit("a", token_request((1, 2, 3), max_tokens=6))
    world.submit("b", see(3, ("x", 9), 2, max_tokens=3))
    world.run()
    assert world.kinds[:2] == ["encode", "prefill"]
    check_answers(world)


def test_a_prompt_gets_as_far_as_its_first_image_without_features() -> None:
    world = VisionWorld(num_pages=40, depth=2)
    world.submit("a", see(6, ("x", 4), 2, max_tokens=2))
    plans = [world.book(), world.book()]
    assert [plan.kind for plan in plans if plan] == ["encode", "prefill"]
    assert isinstance(plans[1], TokenPlan)
    assert plans[1].rows[0].num_tokens == 6
    check_answers(world)


def test_only_images_of_the_next_chunk_are_encoded() -> None:
    world = VisionWorld(num_pages=40, max_batch_input_tokens=8)
    world.submit("a", see(2, ("x", 4), 9, ("y", 4), 2, max_tokens=2))
    world.turn()
    assert (world.kinds, names(world)) == (["encode"], 1)
    check_answers(world)
    assert names(world) == 2


def test_an_image_is_encoded_once_for_all_requests_with_it() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=4)
    for job_id in "abc":
        world.submit(job_id, see(ord(job_id) % 5 + 1, ("x", 5), 2, ("x", 5), 1, max_tokens=2))
    check_answers(world)
    assert names(world) == 1


def test_images_of_prompts_that_are_answered_are_looked_at_no_more() -> None:
    world = VisionWorld(num_pages=40)
    world.submit("a", see(2, ("x", 4), 2, max_tokens=9))
    while not world.scheduler.row_of("a").is_decoding:
        world.turn()
    world.turn()
    tokens, seen = world.scheduler.tokens, list[str]()
    num_covered = tokens.num_covered
    tokens.num_covered = lambda row: seen.append(row.name) or num_covered(row)  # type: ignore
    check_answers(world)
    assert not seen


def test_an_image_in_the_cache_is_not_encoded_again() -> None:
    world = VisionWorld(num_pages=40)
    world.submit("a", see(3, ("x", 5), 2, max_tokens=2))
    world.run()
    world.submit("b", see(1, ("x", 5), 2, max_tokens=2))
    check_answers(world)
    assert names(world) == 1
    assert world.scheduler.stats().counters["vision_cache_hits_total"] == 1


def test_number_of_cached_images_is_reported() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=4)
    world.submit("new", see(1, ("x", 5), 2, ("x", 5), 2, max_tokens=2))
    world.submit("beside it", see(2, ("x", 5), 2, max_tokens=2))
    world.run()
    world.submit("half", see(3, ("x", 5), ("y", 5), 2, max_tokens=2))
    world.run()
    world.submit("prefix", see(3, ("x", 5), ("y", 5), 2, max_tokens=2))
    world.submit("text", token_request((1, 2), max_tokens=2))
    check_answers(world)
    found = {name: world.deltas(name)[-1].num_cached_contents for name in world.jobs}
    assert found == {"new": 0, "beside it": 0, "half": 1, "prefix": 2, "text": 0}


def test_without_a_cache_features_last_as_long_as_they_are_needed() -> None:
    world = VisionWorld(num_pages=40, max_entries=0)
    world.submit("a", see(3, ("x", 5), 2, max_tokens=3))
    world.run()
    assert len(world.features) == 0
    world.submit("b", see(1, ("x", 5), 2, max_tokens=2))
    check_answers(world)
    assert names(world) == 2


def test_a_prompt_whose_pages_are_cached_needs_no_features() -> None:
    world = VisionWorld(num_pages=40, max_entries=0)
    for job_id in "ab":
        world.submit(job_id, see(3, ("x", 5), 6, max_tokens=2))
        world.run()
    check_answers(world)
    assert names(world) == 1


def test_features_are_let_go_of_when_a_prompt_is_over() -> None:
    world = VisionWorld(num_pages=40)
    world.submit("a", see(3, ("x", 5), 2, max_tokens=20))
    while not world.deltas("a"):
        world.turn()
    assert world.features.num_references == 0
    check_answers(world)


def test_images_share_a_step_while_they_are_small() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=4, limits=VisionLimits(max_step_patches=10))
    for name in "abcd":
        world.submit(name, see(2, (name, 4), 1, max_tokens=1))
    world.run()
    assert world.kinds.count("encode") == 2
    check_answers(world)


def test_images_that_do_not_fit_in_memory_together_are_tried_alone() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=4)
    for name in "ab":
        world.submit(name, see((name, 4), 1, max_tokens=1))
    world.book()
    world.fail(MEMORY_SHORT)
    check_answers(world)
    assert world.kinds.count("encode") == 3


def test_a_step_that_fails_ends_the_jobs_that_wait_for_it() -> None:
    world = VisionWorld(num_pages=80)
    world.submit("a", see(("x", 4), 1, max_tokens=1))
    world.submit("b", token_request((1, 2), max_tokens=3))
    world.book()
    world.fail(InternalError("broken"))
    check_answers(world, "b")
    assert world.outputs["a"][-1].error.code == InternalError.code


def test_an_image_that_cannot_be_encoded_ends_its_jobs_alone() -> None:
    world = VisionWorld(num_pages=80)
    bad = see(("x", 4), 1, max_tokens=1)
    world.runner.bad_images.add(bad.contents[0].span.digest)
    world.submit("a", bad)
    world.submit("b", see(("y", 4), 1, max_tokens=2))
    check_answers(world, "b")
    assert world.outputs["a"][-1].error.code == InvalidRequest.code


def test_a_job_that_is_cancelled_in_flight_keeps_its_features_until_the_step_is_over() -> None:
    world = VisionWorld(num_pages=40, depth=2, max_entries=0)
    world.submit("a", see(("x", 8), 1, max_tokens=4))
    world.turn()
    world.commit()
    world.book()
    world.scheduler.cancel("a")
    assert len(world.features) == 1
    world.commit()
    assert len(world.features) == 0
    world.finish_all()


def test_images_of_the_first_rows_are_encoded_first() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=1, schedule_policy="priority")
    for index in range(12):
        request = see((str(index), 5), 2, max_tokens=1)
        world.submit(str(index), replace(request, priority=index))
    last = world.requests["11"].contents[0].span.digest
    world.turn()
    assert world.runner.encoded[0] == last
    check_answers(world)


def test_a_job_whose_reader_is_slow_gets_no_image_encoded() -> None:
    world = VisionWorld(num_pages=80)
    world.submit("a", see(("x", 5), 2, max_tokens=1))
    world.scheduler.set_paused("a", True)
    assert world.book() is None
    check_answers(world)


def test_spans_that_are_whole_are_not_cut() -> None:
    limits = VisionLimits(max_step_patches=64, whole_spans=True)
    world = VisionWorld(num_pages=40, max_batch_input_tokens=6, limits=limits)
    world.submit("a", see(4, ("x", 9), 3, ("y", 4), 2, max_tokens=3))
    check_answers(world)


def test_a_model_that_needs_images_refuses_text() -> None:
    world = VisionWorld(limits=VisionLimits(max_step_patches=64, whole_prompts=True))
    assert isinstance(world.submit("a", token_request((1, 2))), InvalidRequest)
    world.submit("b", see(("x", 4), 9, max_tokens=2))
    check_answers(world, "b")


def test_a_model_of_text_refuses_images() -> None:
    assert isinstance(World().submit("a", see(("x", 4), 1)), InvalidRequest)


def test_an_answer_about_an_image_follows_a_grammar() -> None:
    world = VisionWorld(num_pages=80, max_batch_size=4)
    grammar_worker = world.scheduler.grammar_worker = GrammarWorker(lambda: VOCABULARY)
    posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
    world.scheduler.connect(posted.put)
    grammar = to_grammar("regex", r"(?s:.)*")
    for length in range(1, 9):  # the model samples what it likes: not always letters
        request = see(length, ("x", 5), 2, max_tokens=4)
        world.submit(f"{length}", replace(request, grammar=grammar))
    ended = 0
    while ended < len(world.jobs):
        world.run()
        ended = sum(map(world.has_ended, world.jobs))
        if ended < len(world.jobs):  # a row waits for a mask, which a thread finds
            posted.get(timeout=30)()
    grammar_worker.close()
    errors = [world.outputs.error_code(job_id) for job_id in world.jobs]
    followed = [job_id for job_id, code in zip(world.jobs, errors, strict=True) if code is None]
    assert len(followed) >= 4
    for job_id in followed:
        assert world.output_ids(job_id) == world.answer(job_id)
