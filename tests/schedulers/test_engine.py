"""The loop: order, overlap, and two modalities on one timeline."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from support.engine_seams import (
    FakeFrames,
    FakeLoader,
    FrameRequest,
    FrameRunner,
    Recorder,
    eventually,
)
from support.virtual_engine import Chat, World, answer, ask, prompt_of
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.plan import TokenPlan
from triptych.core.engine_api.reports import Heartbeat, StepReport
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ScheduleOptions, ServerOptions
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.step_log import REPORT_S


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
    starts = [start_s for start_s, _ in world.executors.started]
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
    world.submit("image", "image", FrameRequest(num_frames=50))
    world.turn_until(lambda: len(world.outputs.outputs.get("image", [])) >= 10)
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
    models = [plan.model for _, plan in world.executors.started[:200]]
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
    for _, plan in world.executors.started:
        served_s[plan.model] += world.executors.cost_s(plan)
    assert abs(served_s["image"] - served_s["other"]) < 3.0


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


def test_a_request_is_let_go_with_its_job() -> None:
    class Request:
        num_frames, period_s = 2, 0.0

    world = World([FakeLoader("voice", lambda: (FakeFrames("voice"), FrameRunner()))])
    request = Request()
    held = weakref.ref(request)
    world.submit("job", "voice", request)
    del request
    world.finish("job")
    world.submit("next", "voice", FrameRequest(num_frames=2))
    world.finish("next")
    assert held() is None


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


def test_heartbeats_have_phase_turn_and_stall_budget() -> None:
    chat = Chat()
    world = World([chat.loader])
    world.submit("job", "chat", ask(prompt_of(1), 100))
    world.finish("job")
    busy = [beat for beat in world.beats if beat.phase == "step"]
    assert busy
    assert {beat.stall_budget_s for beat in busy} == {10.0}
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


def test_slow_steps_widen_the_stall_budget() -> None:
    frames = FakeFrames("image", kind="denoise")
    world = World([FakeLoader("image", lambda: (frames, FrameRunner()))], cost_s=lambda plan: 4.0)
    world.submit("image", "image", FrameRequest(num_frames=20))
    world.finish("image")
    assert world.beats[-1].stall_budget_s == pytest.approx(80.0)
    assert len(world.beats) >= 20


class TimedBeats(World):
    """A world that records the time of each heartbeat; the first step takes `first_s`."""

    def __init__(self, *, first_s: float, later_s: float = 0.01) -> None:
        frames = FakeFrames("image", kind="denoise")
        loader = FakeLoader("image", lambda: (frames, FrameRunner()))
        seconds = itertools.chain([first_s], itertools.repeat(later_s))
        super().__init__([loader], cost_s=lambda plan: next(seconds))
        self.beats_s: list[float] = []
        self.engine.on_beat = self._on_beat
        self.submit("image", "image", FrameRequest(num_frames=3))

    def _on_beat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)
        self.beats_s.append(self.clock())

    def longest_silence_s(self) -> float:
        return max(
            later - earlier for earlier, later in itertools.pairwise([*self.beats_s, self.clock()])
        )


def test_a_first_step_may_take_long_and_silence_is_noticed_as_soon_as_ever() -> None:
    """A process that is stopped beside it misses a beat of ten seconds, not of a hundred."""
    world = TimedBeats(first_s=85.0)
    world.finish("image")
    assert world.longest_silence_s() < 1.0
    assert {beat.stall_budget_s for beat in world.beats[:-1] if beat.phase == "step"} == {10.0}


def test_a_first_step_that_hangs_is_noticed_in_the_end() -> None:
    world = TimedBeats(first_s=5000.0)
    world.finish("image")
    before_s = [moment_s for moment_s in world.beats_s if moment_s < 1000.0 + 4000.0]
    last = world.beats[len(before_s) - 1]
    assert 99.0 < before_s[-1] - 1000.0 + last.stall_budget_s <= 100.0


def test_a_later_step_that_hangs_is_silent_at_once() -> None:
    world = TimedBeats(first_s=0.01, later_s=5000.0)
    world.turn_until(lambda: world.clock() > 2000.0)
    before_s = [moment_s for moment_s in world.beats_s if moment_s < 2000.0]
    assert before_s[-1] - 1000.0 < 1.0
    assert world.beats[len(before_s) - 1].stall_budget_s == 10.0


def threaded(loaders: Sequence[FakeLoader], config: Config | None = None) -> EngineCore:
    return EngineCore(loaders, config=config or Config(), ledger=Ledger(1 << 30))


def test_on_threads_two_steps_are_in_flight_and_results_stay_in_order() -> None:
    frames, runner = FakeFrames("image", depth=2), FrameRunner()
    runner.gate = threading.Event()
    engine = threaded([FakeLoader("image", lambda: (frames, runner))])
    outputs = Recorder()
    thread = threading.Thread(target=engine.run)
    thread.start()
    engine.submit(
        Job(
            job_id="image",
            model="image",
            request=FrameRequest(num_frames=5),
            sink=outputs,
            arrival_s=engine.clock(),
        )
    )
    eventually(lambda: len(runner.launched) == 2)
    assert "image" not in outputs.outputs, "the second was launched before the first was over"
    runner.gate.set()
    outputs.wait_final("image")
    assert [output.payload for output in outputs.outputs["image"]] == [1, 2, 3, 4, 5]
    engine.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_time_limit_that_is_no_number_is_refused() -> None:
    chat = Chat()
    world = World([chat.loader])
    request = ask(prompt_of(1), 500)
    for job_id, limit_s in (("none", math.nan), ("short", 0.1)):
        world.engine.submit(
            Job(job_id=job_id, model="chat", request=request, sink=world.outputs, limit_s=limit_s)
        )
    world.finish("none", "short")
    assert world.outputs.error_code("none") == "invalid_request"
    assert world.outputs.error_code("short") == "request_timeout", "others keep their order"


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


def test_min_stall_budget_is_an_option() -> None:
    config = replace(Config(), server=ServerOptions(min_stall_budget_s=2.0))
    world = World([Chat().loader], config=config)
    world.engine.take_turn()
    assert world.beats[-1].stall_budget_s == 2.0


def test_steps_are_reported_as_they_ran_while_they_are_watched() -> None:
    chat, frames = Chat(), FakeFrames("image", kind="denoise")
    world = World(
        [chat.loader, FakeLoader("image", lambda: (frames, FrameRunner()))],
        cost_s=lambda plan: 1.0 if plan.model == "image" else 0.02,
    )
    reports: list[tuple[float, StepReport]] = []
    world.engine.on_steps = lambda report: reports.append((world.clock(), report))
    world.submit("unseen", "chat", ask(prompt_of(1), 20))
    world.finish("unseen")
    assert not reports
    world.engine.watch(True)
    num_unseen = len(world.executors.started)
    world.submit("job", "chat", ask(prompt_of(2), 20))
    world.submit("image", "image", FrameRequest(num_frames=2))
    world.finish("job", "image")
    world.turn_until(lambda: reports and reports[-1][1].running is None)
    reported_steps = [step for _, report in reports for step in report.steps]
    ran = world.executors.started[num_unseen:]
    assert [(step.model, step.kind, step.start_s) for step in reported_steps] == [
        (plan.model, plan.kind, pytest.approx(start_s)) for start_s, plan in ran
    ]
    assert {(step.kind, step.length_s) for step in reported_steps} == {
        ("prefill", 0.02),
        ("decode", 0.02),
        ("denoise", 1.0),
    }
    assert {step.num_rows for step in reported_steps if step.model == "chat"} == {1}
    running = {report.running.kind for _, report in reports if report.running is not None}
    assert {"decode", "denoise"} <= running
    moments = [moment for moment, _ in reports]
    assert all(b - a >= REPORT_S for a, b in itertools.pairwise(moments))
    assert max(b - a for a, b in itertools.pairwise(moments)) == pytest.approx(REPORT_S), (
        "also beside a long step"
    )
    world.engine.watch(False)
    world.submit("unseen too", "chat", ask(prompt_of(3), 20))
    world.finish("unseen too")
    assert len(reports) == len(moments)


def test_a_failed_step_is_reported_as_such() -> None:
    chat = Chat()
    world = World([chat.loader])
    reports: list[StepReport] = []
    world.engine.on_steps = reports.append
    world.engine.watch(True)
    chat.runner.errors[1] = RuntimeError("broken")
    world.submit("job", "chat", ask(prompt_of(2), 20))
    world.finish("job")
    world.turn_until(lambda: any(report.steps for report in reports))
    steps = [step for report in reports for step in report.steps]
    assert [(step.is_failed, step.num_rows) for step in steps][:1] == [(True, 0)]
