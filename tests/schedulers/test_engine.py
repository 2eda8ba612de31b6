"""The loop: order, overlap, faults, and two modalities on one timeline."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fakes import (
    FakeClock,
    FakeFrames,
    FakeLoader,
    FakeRunner,
    FrameRequest,
    FrameRunner,
    Recorder,
    VirtualLanes,
    eventually,
    next_token,
)

from triptych.core.config import Config, DebugOptions, ScheduleOptions, ServerOptions
from triptych.core.errors import DeviceError, OutOfMemory, WeightsError
from triptych.core.job import Job
from triptych.core.kv.pages import PagePool
from triptych.core.ledger import Ledger
from triptych.core.plan import Plan, TokenPlan
from triptych.core.sampling.params import SamplingParams
from triptych.core.tokens import TokenDelta, TokenRequest
from triptych.core.transport.messages import Heartbeat
from triptych.schedulers.engine import Engine
from triptych.schedulers.health import EngineCrashed
from triptych.schedulers.token import TokenScheduler

PAGE_SIZE = 4
VOCAB_SIZE = 1000


class Chat:
    """A fake chat model: the real token scheduler and page pool over a hash."""

    def __init__(self, *, num_pages: int = 256, options: ScheduleOptions | None = None) -> None:
        self.pool = PagePool(num_pages=num_pages, page_size=PAGE_SIZE)
        self.scheduler = TokenScheduler(
            model="chat",
            pool=self.pool,
            options=options or ScheduleOptions(max_batch_size=8, max_batch_input_tokens=32),
            max_length=512,
            namespace=b"fake",
        )
        self.runner = FakeRunner(page_size=PAGE_SIZE, vocab_size=VOCAB_SIZE)
        self.loader = FakeLoader("chat", lambda: (self.scheduler, self.runner))


class World:
    """An engine in virtual time, and the sink of all its jobs."""

    def __init__(
        self,
        loaders: Sequence[FakeLoader],
        *,
        config: Config | None = None,
        cost_s: Callable[[Plan], float] = lambda plan: 0.01,
    ) -> None:
        self.clock = FakeClock()
        self.lanes = VirtualLanes(self.clock, cost_s)
        self.ledger = Ledger(1 << 30)
        self.engine = Engine(
            loaders,
            config=config or Config(),
            ledger=self.ledger,
            clock=self.clock,
            lanes=self.lanes,
        )
        self.beats: list[Heartbeat] = []
        self.engine.on_beat = self.beats.append
        self.outputs = Recorder()
        self.engine.load("chat")

    def submit(self, job_id: str, model: str, request: object) -> None:
        self.engine.submit(
            Job(
                job_id=job_id,
                model=model,
                request=request,
                sink=self.outputs,
                arrival_s=self.clock(),
            )
        )

    def turn_until(self, condition: Callable[[], object], max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            if condition():
                return
            self.engine.take_turn()
        raise AssertionError("did not happen in so many turns")

    def finish(self, *job_ids: str) -> None:
        self.turn_until(lambda: all(map(self.outputs.final, job_ids)))

    def tokens(self, job_id: str) -> list[int]:
        deltas = [output.payload for output in self.outputs.outputs[job_id]]
        return [
            token for delta in deltas if isinstance(delta, TokenDelta) for token in delta.token_ids
        ]


def ask(prompt: Sequence[int], max_tokens: int) -> TokenRequest:
    return TokenRequest(
        prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the fake model says, computed apart from everything under test."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, VOCAB_SIZE))
    return token_ids[len(prompt) :]


def prompt_of(n: int, length: int = 10) -> list[int]:
    return [(7 * n + 13 * i) % VOCAB_SIZE for i in range(length)]


def test_jobs_get_their_own_text_through_a_batched_loop() -> None:
    chat = Chat()
    world = World([chat.loader])
    for n in range(20):
        world.submit(f"job{n}", "chat", ask(prompt_of(n, 5 + 3 * n), 5 + n))
    world.finish(*(f"job{n}" for n in range(20)))
    for n in range(20):
        assert world.tokens(f"job{n}") == answer(prompt_of(n, 5 + 3 * n), 5 + n)
    world.turn_until(lambda: chat.pool.num_leased == 0)
    chat.scheduler.check()


def test_the_next_plan_is_launched_while_one_runs() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("job", "chat", ask(prompt_of(1), 20))
    world.finish("job")
    starts = [start_s for start_s, _ in world.lanes.started]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert max(gaps) == pytest.approx(0.01), "the device never waits for the loop"


def test_nothing_is_launched_far_ahead_of_a_long_step() -> None:
    frames, voice = FakeFrames("image", kind="denoise", depth=2), FakeFrames("voice")
    world = World(
        [
            FakeLoader("image", lambda: (frames, FrameRunner())),
            FakeLoader("voice", lambda: (voice, FrameRunner())),
        ],
        cost_s=lambda plan: 1.0 if plan.model == "image" else 0.02,
    )
    world.submit("picture", "image", FrameRequest(num_frames=50))
    world.turn_until(lambda: len(world.outputs.outputs.get("picture", [])) >= 10)
    world.turn_until(lambda: world.clock() % 1.0 > 0.3)
    world.submit("speech", "voice", FrameRequest(num_frames=1, period_s=0.1))
    asked_s = world.clock()
    world.finish("speech")
    assert world.clock() - asked_s < 1.1, "speech waits for the one step that was running"


def test_chat_and_speech_share_the_loop() -> None:
    """No frame is late by more than one chat step and what was launched ahead of it."""
    chat = Chat(options=ScheduleOptions(max_batch_size=8, max_batch_input_tokens=64))
    voice = FakeFrames("voice", depth=2)
    world = World(
        [chat.loader, FakeLoader("voice", lambda: (voice, FrameRunner()))],
        cost_s=lambda plan: (
            0.002 * plan.num_tokens + 0.005 if isinstance(plan, TokenPlan) else 0.01
        ),
    )
    world.submit("warm", "chat", ask(prompt_of(9, 100), 5))
    world.submit("up", "voice", FrameRequest(num_frames=5, period_s=0.08))
    world.finish("warm", "up")
    voice.lateness_s.clear()
    for n in range(6):
        world.submit(f"voice{n}", "voice", FrameRequest(num_frames=60, period_s=0.08))
        world.submit(f"chat{n}", "chat", ask(prompt_of(n, 300), 40))
    voices, chats = [f"voice{n}" for n in range(6)], [f"chat{n}" for n in range(6)]
    world.finish(*voices, *chats)
    assert max(voice.lateness_s) <= 0.002 * 64 + 0.005
    assert all(world.tokens(f"chat{n}") == answer(prompt_of(n, 300), 40) for n in range(6))
    models = [plan.model for _, plan in world.lanes.started[:200]]
    assert {"chat", "voice"} == set(models)
    chat.scheduler.check()
    voice.check()


def test_two_endless_modalities_get_equal_time() -> None:
    image, other = FakeFrames("image", depth=2), FakeFrames("other", depth=2)
    world = World(
        [
            FakeLoader("image", lambda: (image, FrameRunner())),
            FakeLoader("other", lambda: (other, FrameRunner())),
        ],
        cost_s=lambda plan: 0.3 if plan.model == "image" else 0.05,
    )
    world.submit("a", "image", FrameRequest(num_frames=10_000))
    world.submit("b", "other", FrameRequest(num_frames=10_000))
    end_s = world.clock() + 60.0
    world.turn_until(lambda: world.clock() > end_s)
    served_s = {"image": 0.0, "other": 0.0}
    for _, plan in world.lanes.started:
        served_s[plan.model] += world.lanes.cost_s(plan)
    assert abs(served_s["image"] - served_s["other"]) < 3.0


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


def test_fault_32_nan_ends_one_job_and_its_neighbours_never_notice() -> None:
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


def test_a_cancelled_job_is_gone_within_two_steps() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("stays", "chat", ask(prompt_of(1), 200))
    world.submit("leaves", "chat", ask(prompt_of(2), 200))
    world.turn_until(lambda: len(world.outputs.outputs.get("leaves", [])) > 5)
    leased, launched = chat.pool.num_leased, chat.runner.num_launches
    world.engine.cancel(["leaves", "unknown"])
    world.turn_until(lambda: chat.pool.num_leased < leased - 2)
    assert chat.runner.num_launches - launched <= 2
    assert world.outputs.final("leaves") is not None
    world.engine.cancel(["leaves"])
    world.finish("stays")
    assert world.tokens("stays") == answer(prompt_of(1), 200)


def test_a_paused_job_waits_and_goes_on() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("slow", "chat", ask(prompt_of(1), 50))
    world.turn_until(lambda: len(world.outputs.outputs.get("slow", [])) > 5)
    world.engine.set_paused(["slow", "unknown"], True)
    world.submit("other", "chat", ask(prompt_of(2), 50))
    world.finish("other")
    assert world.outputs.final("slow") is None
    world.engine.set_paused(["slow"], False)
    world.finish("slow")
    assert world.tokens("slow") == answer(prompt_of(1), 50)


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
    "error", [DeviceError("gone"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_a_sticky_device_error_ends_the_engine(error: Exception) -> None:
    frames = FakeFrames("voice")
    world = World([FakeLoader("voice", lambda: (frames, FrameRunner(errors={2: error})))])
    world.submit("frames", "voice", FrameRequest(num_frames=10))
    with pytest.raises(EngineCrashed, match="device"):
        world.engine.run()
    assert world.outputs.error_code("frames") == "internal_error"


def test_repeated_failures_end_the_engine_and_every_job_hears_of_it() -> None:
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


def test_unknown_models_bad_requests_and_double_ids_are_answered() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("lost", "nothing", ask([1], 1))
    world.submit("empty", "chat", ask([], 1))
    world.submit("long", "chat", ask(prompt_of(1, 600), 1))
    world.finish("lost", "empty", "long")
    assert world.outputs.error_code("lost") == "not_found"
    assert world.outputs.error_code("empty") == "invalid_request"
    assert world.outputs.error_code("long") == "context_length_exceeded"
    world.submit("twice", "chat", ask(prompt_of(1), 50))
    second = Recorder()
    world.engine.submit(
        Job(job_id="twice", model="chat", request=None, sink=second, arrival_s=world.clock())
    )
    world.finish("twice")
    assert second.error_code("twice") == "invalid_request"
    assert world.tokens("twice") == answer(prompt_of(1), 50)


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


def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("old", "chat", ask(prompt_of(1), 20))
    world.turn_until(lambda: world.outputs.outputs.get("old"))
    world.engine.drain()
    world.submit("new", "chat", ask(prompt_of(2), 20))
    world.engine.run()
    assert world.tokens("old") == answer(prompt_of(1), 20)
    assert world.outputs.error_code("new") == "draining"
    assert chat.loader.num_closed == 1
    assert world.beats[-1].num_jobs == 0


def test_stop_ends_every_job() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("job", "chat", ask(prompt_of(1), 400))
    world.turn_until(lambda: world.outputs.outputs.get("job"))
    world.engine.stop()
    world.engine.run()
    assert world.outputs.error_code("job") == "engine_down"


def test_beats_tell_the_truth() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("job", "chat", ask(prompt_of(1), 100))
    world.finish("job")
    busy = [beat for beat in world.beats if beat.phase == "step"]
    assert busy
    assert busy[0].stall_budget_s == 100.0, "an unknown kind of step may compile"
    assert busy[-1].stall_budget_s == 10.0
    turns = [beat.turn for beat in world.beats]
    assert turns == sorted(turns)
    begin_s, num_beats = world.clock(), len(world.beats)
    world.turn_until(lambda: world.clock() >= begin_s + 10.0)
    idle = world.beats[num_beats + 1 :]
    assert {beat.phase for beat in idle} == {"idle"}
    assert 19 <= len(idle) <= 22, "twice a second, and no busy polling"
    last = world.beats[-1]
    assert last.gauges['triptych_jobs_running{model="chat"}'] == 0
    assert last.counters['triptych_output_tokens_total{model="chat"}'] == 100
    (seconds,) = (v for k, v in last.histograms.items() if 'kind="decode"' in k)
    assert sum(seconds[:-1]) * 0.01 == pytest.approx(seconds[-1])
    assert {status.state for status in last.models} == {"ready"}


def test_no_beat_is_sent_while_a_step_hangs() -> None:
    chat = Chat()
    world = World([chat.loader], cost_s=lambda plan: 0.01 if plan.step_id < 50 else 10_000.0)
    world.submit("job", "chat", ask(prompt_of(1), 400))
    world.turn_until(lambda: any(plan.step_id == 51 for _, plan in world.lanes.started))
    world.engine.take_turn()
    num_beats, launched = len(world.beats), len(world.lanes.started)
    for _ in range(100):  # others are talking to the loop all the while
        world.clock.advance(1.0)
        world.engine.cancel(["nobody"])
        world.engine.take_turn()
    assert len(world.beats) <= num_beats + 1
    assert len(world.lanes.started) == launched


def test_slow_steps_widen_the_stall_budget() -> None:
    frames = FakeFrames("image", kind="denoise")
    world = World([FakeLoader("image", lambda: (frames, FrameRunner()))], cost_s=lambda plan: 4.0)
    world.submit("picture", "image", FrameRequest(num_frames=20))
    world.finish("picture")
    assert world.beats[-1].stall_budget_s == pytest.approx(80.0)
    assert len(world.beats) >= 20


def test_a_start_that_fails_is_raised_and_told() -> None:
    loader = FakeLoader("chat", lambda: (FakeFrames("chat"), FrameRunner()))
    loader.errors = [WeightsError("model.safetensors: tensor lm_head.weight is missing")]
    world = World([loader])
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        world.engine.run()
    (status,) = world.beats[-1].models
    assert status.state == "failed"
    assert status.error is not None
    assert "lm_head.weight" in status.error.message


def threaded(loaders: Sequence[FakeLoader], config: Config | None = None) -> Engine:
    return Engine(loaders, config=config or Config(), ledger=Ledger(1 << 30))


def test_on_threads_two_steps_are_in_flight_and_results_stay_in_order() -> None:
    frames, runner = FakeFrames("image", depth=2), FrameRunner()
    runner.gate = threading.Event()
    engine = threaded([FakeLoader("image", lambda: (frames, runner))])
    outputs = Recorder()
    thread = threading.Thread(target=engine.run)
    thread.start()
    engine.submit(
        Job(
            job_id="picture",
            model="image",
            request=FrameRequest(num_frames=5),
            sink=outputs,
            arrival_s=engine.clock(),
        )
    )
    eventually(lambda: len(runner.launched) == 2)
    assert "picture" not in outputs.outputs, "the second was launched before the first was over"
    runner.gate.set()
    outputs.wait_final("picture")
    assert [output.payload for output in outputs.outputs["picture"]] == [1, 2, 3, 4, 5]
    engine.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_on_threads_thirty_two_jobs_and_half_of_them_leave() -> None:
    options = ScheduleOptions(max_batch_size=32, max_batch_input_tokens=256)
    chat = Chat(num_pages=2048, options=options)
    engine = threaded([chat.loader], Config(schedule=options))
    outputs = Recorder()
    thread = threading.Thread(target=engine.run)
    thread.start()
    for n in range(32):
        request = ask(prompt_of(n), 400 if n % 2 else 60)
        engine.submit(
            Job(job_id=f"job{n}", model="chat", request=request, sink=outputs, arrival_s=0.0)
        )
    outputs.wait_final("job0")
    engine.cancel([f"job{n}" for n in range(32) if n % 2])
    outputs.wait_final(*(f"job{n}" for n in range(32)))
    engine.drain()
    thread.join(timeout=30)
    assert not thread.is_alive()
    chat.scheduler.check()
    assert chat.pool.num_leased == 0
    for n in range(0, 32, 2):
        deltas = [output.payload for output in outputs.outputs[f"job{n}"]]
        assert [t for delta in deltas for t in delta.token_ids] == answer(prompt_of(n), 60)


def test_a_scheduler_that_breaks_ends_the_engine() -> None:
    class Broken(FakeFrames):
        def commit(self, plan: Plan, result: object, now_s: float) -> None:
            raise AssertionError("my books do not balance")

    world = World([FakeLoader("voice", lambda: (Broken("voice"), FrameRunner()))])
    world.submit("job", "voice", FrameRequest(num_frames=2))
    with pytest.raises(AssertionError, match="books"):
        world.engine.run()
    assert world.outputs.error_code("job") == "engine_down"


def test_min_stall_budget_is_an_option() -> None:
    config = replace(Config(), server=ServerOptions(min_stall_budget_s=2.0))
    world = World([Chat().loader], config=config)
    world.engine.take_turn()
    assert world.beats[-1].stall_budget_s == 2.0
