"""What goes wrong in a step, and how far it reaches."""

from __future__ import annotations

import pytest

from support.engine_seams import FakeFrames, FakeLoader, FrameRequest, FrameRunner
from support.virtual_engine import Chat, World, answer, ask, prompt_of
from triptych.core.engine_api.plan import Plan
from triptych.core.errors import DeviceError, OutOfMemory, RankLost, WeightsError
from triptych.core.options.config import Config, DebugOptions, DeviceOptions, ScheduleOptions
from triptych.schedulers.health import EngineCrashed


def test_fault_31_an_exhausted_pool_preempts_and_the_text_is_the_same() -> None:
    chat = Chat(num_pages=24)
    world = World([chat.loader])
    for n in range(6):
        world.submit(f"job{n}", "chat", ask(prompt_of(n, 12), 40))
    world.finish(*(f"job{n}" for n in range(6)))
    assert chat.scheduler.stats().counters["preemptions_total"] > 0
    for n in range(6):
        assert world.tokens(f"job{n}") == answer(prompt_of(n, 12), 40)
    chat.scheduler.check()


def test_fault_32_nan_ends_one_job_and_not_its_batch_mates() -> None:
    chat = Chat()
    chat.runner.poison["job1"] = 5
    world = World([chat.loader])
    for n in range(4):
        world.submit(f"job{n}", "chat", ask(prompt_of(n), 30))
    world.finish(*(f"job{n}" for n in range(4)))
    assert world.outputs.error_code("job1") == "non_finite"
    for n in (0, 2, 3):
        assert world.tokens(f"job{n}") == answer(prompt_of(n), 30)
    chat.scheduler.check()


def test_three_non_finite_jobs_in_a_minute_end_the_engine() -> None:
    chat = Chat()
    chat.runner.poison.update(dict.fromkeys(("a", "b", "c"), 0))
    world = World([chat.loader])
    for job_id in ("a", "b", "c"):
        world.submit(job_id, "chat", ask(prompt_of(ord(job_id)), 4))
    with pytest.raises(EngineCrashed, match="NaN"):
        world.finish("a", "b", "c", "d")


def test_non_finite_jobs_far_apart_do_not() -> None:
    chat = Chat()
    chat.runner.poison.update(dict.fromkeys(("a", "b", "c"), 0))
    world = World([chat.loader])
    for job_id in ("a", "b", "c"):
        world.submit(job_id, "chat", ask(prompt_of(ord(job_id)), 4))
        world.finish(job_id)
        world.clock.advance(31.0)
    world.submit("d", "chat", ask(prompt_of(1), 4))
    world.finish("d")
    assert world.tokens("d") == answer(prompt_of(1), 4)


def test_a_step_that_raises_ends_its_jobs_alone(caplog: pytest.LogCaptureFixture) -> None:
    frames = FakeFrames("voice")
    chat = Chat()
    runner = FrameRunner(errors={3: ValueError("secret /path/in/traceback")})
    world = World([chat.loader, FakeLoader("voice", lambda: (frames, runner))])
    world.submit("frames", "voice", FrameRequest(num_frames=10))
    world.submit("chat", "chat", ask(prompt_of(1), 30))
    world.finish("frames", "chat")
    assert world.outputs.error_code("frames") == "internal_error"
    final = world.outputs.final("frames")
    assert final is not None
    assert final.error is not None
    assert "secret" not in final.error.message
    assert "secret" in caplog.text, "the traceback is in the log"
    assert world.tokens("chat") == answer(prompt_of(1), 30)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("A step did not fit."),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_step_that_does_not_fit_is_tried_in_halves(error: Exception) -> None:
    chat = Chat()
    chat.runner.errors = {4: error}
    world = World([chat.loader])
    for n in range(4):
        world.submit(f"job{n}", "chat", ask(prompt_of(n), 10))
    world.finish(*(f"job{n}" for n in range(4)))
    for n in range(4):
        assert world.tokens(f"job{n}") == answer(prompt_of(n), 10)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceError("gone"), "internal_error"),
        (RuntimeError("CUDA error: an illegal memory access"), "internal_error"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access"), "internal_error"),
        (RuntimeError("Triton Error [HIP]: unspecified launch failure"), "internal_error"),
        (RankLost("gone"), "engine_down"),
    ],
)
def test_a_sticky_device_error_ends_the_engine(error: Exception, code: str) -> None:
    frames = FakeFrames("voice")
    world = World([FakeLoader("voice", lambda: (frames, FrameRunner(errors={2: error})))])
    world.submit("frames", "voice", FrameRequest(num_frames=10))
    with pytest.raises(EngineCrashed, match="device"):
        world.engine.run()
    assert world.outputs.error_code("frames") == code


def test_repeated_failures_end_the_engine_and_fail_every_job() -> None:
    chat = Chat()
    chat.runner.errors = dict.fromkeys(range(1, 10), RuntimeError("broken"))
    world = World([chat.loader])
    for n in range(3):
        world.submit(f"chat{n}", "chat", ask(prompt_of(n, 30), 10))
    with pytest.raises(EngineCrashed, match="in a row"):
        world.engine.run()
    assert all(world.outputs.error_code(f"chat{n}") == "internal_error" for n in range(3))


def test_sim_failure_fails_the_same_share_of_steps_each_time() -> None:
    def failures(percent: float) -> list[int]:
        frames = FakeFrames("voice")
        config = Config(debug=DebugOptions(sim_failure=percent))
        world = World([FakeLoader("voice", lambda: (frames, FrameRunner()))], config=config)
        failed = []
        for n in range(300):
            world.submit(f"job{n}", "voice", FrameRequest(num_frames=1))
            world.finish(f"job{n}")
            if world.outputs.error_code(f"job{n}"):
                failed.append(n)
        return failed

    assert failures(0.0) == []
    first = failures(5.0)
    assert 3 <= len(first) <= 40
    assert failures(5.0) == first


@pytest.mark.parametrize("seed", range(6))
def test_steps_that_fail_with_the_next_on_its_way_spoil_no_other_text(seed: int) -> None:
    chat = Chat(num_pages=24)
    config = Config(device=DeviceOptions(seed=seed), debug=DebugOptions(sim_failure=4.0))
    world = World([chat.loader], config=config)
    asked = {f"job{n}": (prompt_of(n % 5, 5 + 7 * (n % 4)), 1 + n % 12) for n in range(40)}
    for job_id, (prompt, num_tokens) in asked.items():
        world.submit(job_id, "chat", ask(prompt, num_tokens))
        for _ in range(3):
            world.engine.take_turn()
    world.finish(*asked)
    whole = [job_id for job_id in asked if world.outputs.error_code(job_id) is None]
    assert 0 < len(whole) < len(asked)
    for job_id in whole:
        assert world.tokens(job_id) == answer(*asked[job_id])
    chat.scheduler.check()


def test_overload_is_refused_with_a_time_to_come_back() -> None:
    options = ScheduleOptions(max_batch_size=2, max_queue_size=4, max_batch_input_tokens=32)
    chat = Chat(options=options)
    world = World([chat.loader], config=Config(schedule=options))
    jobs = [f"job{n}" for n in range(60)]
    for n, job_id in enumerate(jobs):
        world.submit(job_id, "chat", ask(prompt_of(n), 10))
    world.finish(*jobs)
    refused = [job_id for job_id in jobs if world.outputs.error_code(job_id)]
    assert 50 <= len(refused) <= 56
    for job_id in refused:
        final = world.outputs.final(job_id)
        assert final is not None
        assert final.error is not None
        assert final.error.code == "overloaded"
        assert final.error.retry_after_s is not None
        assert final.error.retry_after_s > 0
    for n, job_id in enumerate(jobs):
        if job_id not in refused:
            assert world.tokens(job_id) == answer(prompt_of(n), 10)


def test_no_beat_is_sent_while_a_step_hangs() -> None:
    chat = Chat()
    world = World([chat.loader], cost_s=lambda plan: 0.01 if plan.step_id < 50 else 10_000.0)
    world.submit("job", "chat", ask(prompt_of(1), 400))
    world.turn_until(lambda: any(plan.step_id == 51 for _, plan in world.executors.started))
    world.engine.take_turn()
    num_beats, launched = len(world.beats), len(world.executors.started)
    for _ in range(100):  # others are talking to the loop all the while
        world.clock.advance(1.0)
        world.engine.cancel(["nobody"])
        world.engine.take_turn()
    assert len(world.beats) <= num_beats + 1
    assert len(world.executors.started) == launched


def test_failed_start_raises_and_is_in_the_heartbeat() -> None:
    loader = FakeLoader("chat", lambda: (FakeFrames("chat"), FrameRunner()))
    loader.errors = [WeightsError("model.safetensors: tensor lm_head.weight is missing")]
    world = World([loader])
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        world.engine.run()
    (status,) = world.beats[-1].models
    assert status.state == "failed"
    assert status.error is not None
    assert "lm_head.weight" in status.error.message


def test_a_scheduler_that_breaks_ends_the_engine() -> None:
    class Broken(FakeFrames):
        def commit(self, plan: Plan, result: object, now_s: float) -> None:
            raise AssertionError("my books do not balance")

    world = World([FakeLoader("voice", lambda: (Broken("voice"), FrameRunner()))])
    world.submit("job", "voice", FrameRequest(num_frames=2))
    with pytest.raises(AssertionError, match="books"):
        world.engine.run()
    assert world.outputs.error_code("job") == "engine_down"
