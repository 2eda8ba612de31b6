"""What goes wrong with one stream stays with it."""

import pytest

from support.speech_world import ENDLESS, LOOPS, SpeechWorld, segment, speech_model, speech_request
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.errors import InternalError, OutOfMemory, TriptychError
from triptych.modalities.tts.plan import AudioPlan


def _busy_world(*, num_jobs: int = 4, depth: int = 2, **shape: int) -> SpeechWorld:
    """A world in the middle of speaking."""
    world = SpeechWorld(model=speech_model(**shape), depth=depth)
    for n in range(num_jobs):
        spec = segment(n, ENDLESS, max_steps=60)
        world.submit(f"{n}", speech_request(spec, segment(n + 50)))
    for _ in range(60):
        world.turn()
    assert all(world.sound(f"{n}") for n in range(num_jobs)), "everybody has begun"
    return world


def test_a_cancelled_stream_frees_its_pages_and_its_row_with_the_steps_in_flight() -> None:
    world = _busy_world()
    world.scheduler.cancel("1")
    assert world.deltas("1")[-1].finish_reason == "cancelled"
    for _ in range(world.depth):
        world.commit()
    world.scheduler.check()
    assert world.scheduler.stats().num_running == 3
    assert len(world.scheduler._state.free_slots) == world.options.max_streams - 3
    assert len(world.scheduler._tokens.state.rows) == 3
    world.finish_all()


def test_a_cancelled_stream_is_in_no_later_step() -> None:
    world = _busy_world()
    world.scheduler.cancel("1")
    num_before = len(world.runner.launched)
    world.run()
    for plan in world.runner.launched[num_before:]:
        assert isinstance(plan, TokenPlan | AudioPlan)
        assert not any(row.job_id.partition("#")[0] == "1" for row in plan.rows)
    world.finish_all()


def test_a_slow_reader_stops_its_own_stream_alone() -> None:
    world = _busy_world()
    world.scheduler.set_paused("2", True)
    world.run()
    assert not world.outputs["2"][-1].is_final
    assert all(world.outputs[name][-1].is_final for name in "013")
    world.now_s += 100.0
    world.finish_all()
    assert world.scheduler.stats().counters["speech_underruns_total"] == 0, (
        "its listener stood still"
    )


def test_the_time_a_listener_stood_still_is_no_wait_for_others() -> None:
    world = _busy_world(num_jobs=1)
    world.scheduler.set_paused("0", True)
    world.run()
    world.now_s += 100.0
    world.scheduler.set_paused("0", False)
    world.finish_all()
    assert world.scheduler._estimates.wait_s < 1.0


def test_nan_in_the_sound_fails_that_job_alone() -> None:
    world = _busy_world()
    world.runner.bad_sound.add("0")
    world.run()
    error = world.outputs["0"][-1].error
    assert error is not None
    assert error.code == "non_finite"
    assert all(world.outputs[name][-1].error is None for name in "123")
    world.finish_all()


def test_nan_in_the_logits_fails_that_job_alone() -> None:
    world = _busy_world()
    world.runner.bad_logits.add("0")
    world.run()
    error = world.outputs["0"][-1].error
    assert error is not None
    assert error.code == "non_finite"
    assert all(world.outputs[name][-1].error is None for name in "123")
    world.finish_all()


def _launch(world: SpeechWorld, kind: type[TokenPlan | AudioPlan], error: TriptychError) -> int:
    """Turn until a plan of `kind` with several rows was launched, which fails; its rows."""
    for _ in range(500):
        world.turn()
        if len(world.in_flight) < world.depth:
            plan = world.book()
            if isinstance(plan, kind) and len(plan.rows) > 1:
                world.in_flight[-1] = (plan, error)
                if isinstance(plan, AudioPlan):
                    for row in plan.rows:
                        world.runner._codecs.pop(row.slot, None)
                return len(plan.rows)
    raise AssertionError("there was no such plan")


@pytest.mark.parametrize("kind", [TokenPlan, AudioPlan])
@pytest.mark.parametrize("lookahead_frames", [0, 2])
def test_a_step_that_runs_out_of_memory_is_tried_again(
    kind: type[TokenPlan | AudioPlan], lookahead_frames: int
) -> None:
    world = _busy_world(depth=1, lookahead_frames=lookahead_frames)
    _launch(world, kind, OutOfMemory("full"))
    world.finish_all()
    assert all(world.outputs[name][-1].error is None for name in world.jobs)


@pytest.mark.parametrize("kind", [TokenPlan, AudioPlan])
def test_a_step_that_breaks_ends_its_own_jobs(kind: type[TokenPlan | AudioPlan]) -> None:
    world = _busy_world(depth=1)
    num_rows = _launch(world, kind, InternalError("broken"))
    world.run()
    failed = [name for name in world.jobs if world.outputs[name][-1].error is not None]
    assert len(failed) == num_rows
    world.finish_all()


def test_a_decoder_that_has_no_memory_even_alone_fails() -> None:
    world = _busy_world(num_jobs=1, depth=1)
    for _ in range(100):
        plan = world.book()
        if isinstance(plan, AudioPlan):
            world.in_flight[-1] = (plan, OutOfMemory("full"))
            break
        world.commit()
    world.run()
    error = world.outputs["0"][-1].error
    assert error is not None
    assert error.code == "out_of_memory"
    world.finish_all()


def test_a_loop_ends_its_segment_and_the_next_one_is_spoken() -> None:
    world = SpeechWorld(model=speech_model(frame_s=0.1))
    world.submit("a", speech_request(segment(1, LOOPS, max_steps=140), segment(3)))
    world.run()
    finishes = [delta.segment_finish for delta in world.deltas("a") if delta.segment_finish]
    assert finishes == ["loop", "stop"]
    assert world.deltas("a")[-1].finish_reason == "loop"
    assert world.deltas("a")[-1].num_output_tokens < 140
    assert world.scheduler.stats().counters["speech_loops_total"] == 1
    world.scheduler.check()


def test_an_endless_segment_ends_at_its_bound() -> None:
    world = SpeechWorld()
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=23)))
    world.finish_all()
    assert world.deltas("a")[-1].segment_finish == "length"
    assert world.deltas("a")[-1].num_output_tokens == 23


def test_a_codec_row_is_not_given_away_while_it_is_decoded() -> None:
    world = SpeechWorld(max_streams=1)
    world.submit("a", speech_request(segment(1, ENDLESS, max_steps=60)))
    world.submit("b", speech_request(segment(2)))
    while not any(isinstance(plan, AudioPlan) for plan, _ in world.in_flight):
        if world.book() is None:
            world.commit()
    world.scheduler.cancel("a")
    world.scheduler.check()
    assert world.scheduler.stats().num_running == 0
    while world.commit():
        world.scheduler.check()
    assert world.scheduler.stats().num_running == 1, "now it is b's"
    world.finish_all()
