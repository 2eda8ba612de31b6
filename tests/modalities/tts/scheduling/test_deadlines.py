"""Speech keeps ahead of its listeners, on the real engine and timeline in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.engine_seams import FakeLoader, Recorder
from support.speech_world import (
    ENDLESS,
    MODEL,
    FakeSpeechRunner,
    SpeechWorld,
    segment,
    speech_model,
)
from support.speech_world import speech_request as say
from support.virtual_engine import Chat, World, ask, prompt_of
from triptych.core.engine_api.job import Output
from triptych.core.engine_api.plan import Plan, TokenPlan
from triptych.core.kv.pages import PagePool
from triptych.core.options.config import ScheduleOptions, SpeechOptions
from triptych.modalities.tts.plan import AudioPlan
from triptych.modalities.tts.scheduling.playback import Playback
from triptych.modalities.tts.scheduling.scheduler import SpeechScheduler

FRAME_S = 0.08


class TimedRecorder(Recorder):
    """Remembers when each output came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self.times: dict[str, list[tuple[float, Output]]] = {}

    def __call__(self, output: Output) -> None:
        self.times.setdefault(output.job_id, []).append((self.clock(), output))
        super().__call__(output)


class Speech:
    """The fake runner under the real scheduler, as a model for an engine."""

    def __init__(self, *, cost_s: Callable[[Plan], float], **speech: object) -> None:
        model = speech_model(frame_s=FRAME_S)
        self.sample_rate = model.sample_rate
        self.scheduler = SpeechScheduler(
            model=model,
            pool=PagePool(num_pages=2000, page_size=4),
            schedule=ScheduleOptions(max_batch_size=16, max_batch_input_tokens=64),
            speech=SpeechOptions(**speech),  # type: ignore[arg-type]
            max_length=1000,
            namespace=b"fake",
        )
        self.runner = FakeSpeechRunner(model, page_size=4, cost_s=cost_s)
        self.loader = FakeLoader(MODEL, lambda: (self.scheduler, self.runner))

    def played(self, recorder: TimedRecorder, job_id: str) -> Playback:
        """The playback of a job at its listener."""
        playback = Playback(0.0)
        for now_s, output in recorder.times[job_id]:
            if output.payload is not None and output.payload.pcm:
                playback.give(len(output.payload.pcm) / 4 / self.sample_rate, now_s)
        return playback


def _cost_s(plan: Plan) -> float:
    """Of chat: 200 ms for a full chunk of a prompt; of speech: some ms."""
    if isinstance(plan, AudioPlan):
        return 0.004 + 0.001 * sum(len(row.codes) for row in plan.rows)
    assert isinstance(plan, TokenPlan)
    if plan.model == "chat":
        return 0.008 + 0.003 * plan.num_tokens
    return 0.006 + 0.0005 * plan.num_tokens


def test_long_prompts_of_a_chat_do_not_stop_speech() -> None:
    chat = Chat(
        num_pages=2000, options=ScheduleOptions(max_batch_size=8, max_batch_input_tokens=64)
    )
    speech = Speech(cost_s=_cost_s)
    world = World([chat.loader, speech.loader], cost_s=_cost_s)
    world.outputs = recorder = TimedRecorder(world.clock)
    for n in range(8):  # what the steps cost has been learned by the time that it matters
        world.submit(f"early{n}", MODEL, say(segment(n, ENDLESS, max_steps=40)))
        world.submit(f"hello{n}", "chat", ask(prompt_of(n, 60), 10))
    world.finish(*(f"early{n}" for n in range(8)), *(f"hello{n}" for n in range(8)))
    for n in range(6):
        world.submit(f"voice{n}", MODEL, say(segment(n, ENDLESS, max_steps=150)))
    for n in range(6):
        world.submit(f"chat{n}", "chat", ask(prompt_of(n, 400), 60))
    voices, chats = [f"voice{n}" for n in range(6)], [f"chat{n}" for n in range(6)]
    world.finish(*voices, *chats)
    for name in voices:
        assert speech.played(recorder, name).num_underruns == 0, name
    speech.scheduler.check()


def test_a_new_stream_begins_soon_though_others_are_far_ahead() -> None:
    speech = Speech(cost_s=_cost_s)
    world = World([speech.loader], cost_s=_cost_s)
    world.outputs = recorder = TimedRecorder(world.clock)
    for n in range(10):
        world.submit(f"{n}", MODEL, say(segment(n, ENDLESS, max_steps=300)))
    world.turn_until(lambda: all(world.outputs.outputs.get(f"{n}") for n in range(10)))
    end_s = world.clock() + 3.0
    world.turn_until(lambda: world.clock() > end_s)
    asked_s = world.clock()
    world.submit("new", MODEL, say(segment(99, ENDLESS, max_steps=20)))
    world.turn_until(lambda: bool(world.outputs.outputs.get("new")))
    assert world.clock() - asked_s < 0.2
    world.finish("new", *(f"{n}" for n in range(10)))
    assert all(speech.played(recorder, f"{n}").num_underruns == 0 for n in range(10))


def test_first_chunks_are_short_and_later_ones_grow() -> None:
    world = SpeechWorld(model=speech_model(frame_s=0.5))
    world.submit("a", say(segment(1, ENDLESS, max_steps=60)))
    world.submit("warm", say(segment(2, ENDLESS, max_steps=60)))
    world.run()
    sizes = [
        len(row.codes)
        for plan in world.runner.launched
        if isinstance(plan, AudioPlan)
        for row in plan.rows
        if row.job_id == "a"
    ]
    assert sizes[0] == 1
    assert max(sizes) > 1
    assert all(later <= 2 * max(sizes[: i + 1]) for i, later in enumerate(sizes[1:]))


@pytest.mark.parametrize(("chunks", "sizes"), [((3,), [3, 3, 3, 1]), ((1, 2, 4), [1, 2, 4, 3])])
def test_fixed_chunks_are_what_was_asked_for(chunks: tuple[int, ...], sizes: list[int]) -> None:
    world = SpeechWorld(chunk_size=chunks)
    world.submit("a", say(segment(1, ENDLESS, max_steps=10)))
    world.finish_all()
    plans = [plan for plan in world.runner.launched if isinstance(plan, AudioPlan)]
    assert [len(plan.rows[0].codes) for plan in plans] == sizes


def test_streams_far_ahead_are_left_out_while_another_is_pressed() -> None:
    world = SpeechWorld(model=speech_model(frame_s=0.02))
    _learn(world)
    world.submit("rich", say(segment(1, ENDLESS, max_steps=140)))
    for _ in range(100):
        world.turn()
    world.scheduler._state.streams["rich"].playback.due_s += 1000.0
    world.submit("poor", say(segment(2, ENDLESS, max_steps=100)))
    first = len(world.runner.launched)
    while not world.outputs["poor"] or not world.outputs["poor"][-1].is_final:
        world.turn()
    rows = [
        {row.job_id for row in plan.rows}
        for plan in world.runner.launched[first:]
        if isinstance(plan, TokenPlan)
    ]
    assert sum({"poor#0"} == jobs for jobs in rows) > 40
    world.finish_all()


def test_streams_without_a_listener_take_what_is_left() -> None:
    def cost_s(plan: Plan) -> float:
        if isinstance(plan, AudioPlan):
            return 0.002 + 0.001 * sum(len(row.codes) for row in plan.rows)
        assert isinstance(plan, TokenPlan)
        return 0.002 + 0.0055 * plan.num_tokens

    speech = Speech(cost_s=cost_s)
    world = World([speech.loader], cost_s=cost_s)
    world.outputs = recorder = TimedRecorder(world.clock)
    for n in range(6):
        world.submit(f"early{n}", MODEL, say(segment(n, ENDLESS, max_steps=20 + 4 * n)))
    world.finish(*(f"early{n}" for n in range(6)))
    for n in range(4):
        world.submit(f"file{n}", MODEL, say(segment(n, ENDLESS, max_steps=400), is_live=False))
    live, files = [f"live{n}" for n in range(8)], [f"file{n}" for n in range(4)]
    for n, name in enumerate(live):
        world.submit(name, MODEL, say(segment(n, ENDLESS, max_steps=100)))
    world.finish(*live)
    assert all(speech.played(recorder, name).underrun_s < 0.01 for name in live)
    assert not any(world.outputs.final(name) for name in files)
    world.finish(*files)


def test_files_leave_codec_rows_to_listeners() -> None:
    world = SpeechWorld(max_streams=4)
    for n in range(6):
        world.submit(f"file{n}", say(segment(n), is_live=False))
    assert world.scheduler.stats().num_running == 2
    for n in range(3):
        world.submit(f"live{n}", say(segment(n)))
    assert world.scheduler.stats().num_running == 4
    world.finish_all()


def test_nothing_is_due_without_a_listener() -> None:
    world = SpeechWorld()
    world.submit("file", say(segment(1, ENDLESS, max_steps=30), is_live=False))
    for _ in range(40):
        proposal = world.scheduler.propose(world.now_s)
        assert proposal is None or proposal.due_s == float("inf")
        world.turn()
    world.finish_all()


def test_the_first_prompt_waits_for_batch_mates() -> None:
    world = SpeechWorld(ce_delay_ms=500.0)
    world.submit("a", say(segment(1)))
    proposal = world.scheduler.propose(world.now_s)
    assert proposal is not None
    assert proposal.not_before_s == pytest.approx(0.5)
    world.now_s = 0.3
    world.submit("b", say(segment(2)))
    assert world.book() is not None, "they go together"
    assert world.now_s == pytest.approx(0.5)
    plan = world.in_flight[-1][0]
    assert isinstance(plan, TokenPlan)
    assert {row.job_id for row in plan.rows} == {"a#0", "b#0"}
    world.finish_all()


def test_full_batch_does_not_wait_for_more_rows() -> None:
    world = SpeechWorld(ce_delay_ms=500.0, max_queue_size_tg=2)
    world.submit("a", say(segment(1)))
    world.submit("b", say(segment(2)))
    assert world.book() is not None
    assert world.now_s < 0.1
    world.finish_all()


def test_rows_are_as_many_as_asked_for() -> None:
    world = SpeechWorld(max_queue_size_tg=2)
    for n in range(5):
        world.submit(f"{n}", say(segment(n)))
    world.finish_all()
    plans = [plan for plan in world.runner.launched if isinstance(plan, TokenPlan)]
    assert max(len(plan.rows) for plan in plans) == 2


def test_prompts_go_first_while_few_rows_run() -> None:
    def first_batches(least: int) -> list[str]:
        schedule = ScheduleOptions(max_batch_size=8, max_batch_input_tokens=6)
        world = SpeechWorld(schedule=schedule, min_batch_size_tg=least, depth=1)
        for n in range(3):
            world.submit(f"{n}", say(segment(n, *range(6), ENDLESS, max_steps=20), is_live=False))
        for _ in range(6):
            world.turn()
            world.turn()
        world.finish_all()
        return [plan.kind for plan in world.runner.launched[:4]]

    assert "mixed" in first_batches(0)
    assert first_batches(3) == ["prefill"] * 4


def test_admitted_streams_begin_before_the_next_is_admitted() -> None:
    def prefilled_before_sound(*, is_first: bool) -> int:
        world = SpeechWorld(
            model=speech_model(delay_steps=4),
            depth=1,
            schedule=ScheduleOptions(max_batch_size=8, max_batch_input_tokens=16),
            enable_prioritize_first_decode=is_first,
        )
        for n in range(4):
            world.submit(f"{n}", say(segment(n, *range(12), ENDLESS, max_steps=9)))
        world.run()
        kinds = [plan.kind for plan in world.runner.launched]
        world.finish_all()
        return sum(kind in ("prefill", "mixed") for kind in kinds[: kinds.index("audio")])

    assert prefilled_before_sound(is_first=True) == 1
    assert prefilled_before_sound(is_first=False) > 1


def test_speech_runs_no_further_ahead_than_asked() -> None:
    world = SpeechWorld(model=speech_model(frame_s=0.5), max_lead_s=3.0)
    world.submit("a", say(segment(1, ENDLESS, max_steps=60)))
    leads_s = []
    while not world.outputs["a"] or not world.outputs["a"][-1].is_final:
        assert world.turn()
        if stream := world.scheduler._state.streams.get("a"):
            leads_s.append(stream.playback.lead_s(world.now_s))
    assert 3.0 < max(leads_s) < 6.0
    assert world.scheduler.stats().counters["speech_underruns_total"] == 0
    assert world.now_s > 20.0, "thirty seconds of sound cannot be had at once"


def test_gauges_of_playback() -> None:
    world = SpeechWorld(model=speech_model(frame_s=0.5))
    world.submit("a", say(segment(1, ENDLESS, max_steps=60)))
    world.submit("file", say(segment(2, ENDLESS, max_steps=60), is_live=False))
    while not world.sound("a"):
        world.turn()
    gauges = world.scheduler.stats().gauges
    assert (gauges["speech_streams"], gauges["speech_streams_live"]) == (2, 1)
    assert gauges["speech_streams_buffered_below_100ms"] == 0
    assert gauges["speech_streams_buffered_below_1s"] == 1
    world.now_s += 100.0
    while not world.scheduler.stats().counters["speech_underruns_total"]:
        world.turn()
    counters = world.scheduler.stats().counters
    assert 90.0 < counters["speech_underrun_seconds_total"] < 110.0
    world.finish_all()
    counters = world.scheduler.stats().counters
    assert counters["speech_audio_seconds_total"] == pytest.approx(60.0)
    assert counters["speech_frames_total"] == 120


def _learn(world: SpeechWorld) -> None:
    """Let the scheduler see what its steps cost."""
    for n in range(8):
        world.submit(f"early{n}", say(segment(n, ENDLESS, max_steps=10 + n)))
    world.run()
