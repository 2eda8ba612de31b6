"""Models come and go while others serve."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from support.engine_seams import (
    FakeFrames,
    FakeLoader,
    FakeRunner,
    FrameRequest,
    FrameRunner,
    Recorder,
    eventually,
)
from support.load_bench import LoadBench
from support.virtual_engine import Chat, World, ask, prompt_of
from triptych.core.engine_api.job import Job
from triptych.core.engine_api.model_changes import LoadModel, UnloadModel
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.errors import ModelTooLarge, TriptychError, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions, ScheduleOptions
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.engine import EngineCore
from triptych.schedulers.model_manager import RETRY_FAILED_AFTER_S
from triptych.schedulers.tokens.scheduler import TokenScheduler

FIRST_USE = Config(models=ModelOptions(load="first-use"))


def loader(name: str, ledger: Ledger | None = None, num_bytes: int = 0) -> FakeLoader:
    return FakeLoader(
        name, lambda: (FakeFrames(name), FrameRunner()), ledger=ledger, num_bytes=num_bytes
    )


def test_a_model_loads_on_first_use() -> None:
    chat, image = loader("chat"), loader("image")
    bench = LoadBench(chat, image, config=FIRST_USE)
    bench.run_for(1.0)
    assert bench.states() == {"chat": "unloaded", "image": "unloaded"}
    bench.submit("job", "chat")
    bench.finish("job")
    bench.run_for(1.0)
    assert bench.codes("job") == [None]
    assert bench.states() == {"chat": "ready", "image": "unloaded"}
    assert (chat.num_loads, image.num_loads) == (1, 0)


def test_models_load_at_start_and_one_that_does_not_fit_waits_for_its_use() -> None:
    ledger = Ledger(100)
    chat, image = loader("chat", ledger, 80), loader("image", ledger, 80)
    bench = LoadBench(chat, image, ledger=ledger, config=Config())
    bench.engine._models.start()
    bench.run_for(1.0)
    assert bench.states() == {"chat": "ready", "image": "unloaded"}
    bench.submit("job", "image")
    bench.finish("job")
    bench.run_for(1.0)
    assert bench.codes("job") == [None]
    assert bench.states() == {"chat": "unloaded", "image": "ready"}


def test_a_job_that_waits_at_the_start_may_send_an_idle_model_away() -> None:
    ledger = Ledger(100)
    bench = LoadBench(
        loader("chat", ledger, 80), loader("image", ledger, 80), ledger=ledger, config=Config()
    )
    bench.submit("job", "image")
    bench.engine.drain()
    bench.engine.run()
    assert bench.codes("job") == [None]


def test_the_longest_idle_model_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ledger = Ledger(100)
    a, b, c = (loader(name, ledger, 40) for name in ("a", "b", "c"))
    bench = LoadBench(a, b, c, ledger=ledger, config=FIRST_USE)
    for n, name in enumerate(("a", "b", "a", "c")):
        bench.submit(f"job{n}", name)
        bench.finish(f"job{n}")
        bench.run_for(1.0)
    assert bench.states() == {"a": "ready", "b": "unloaded", "c": "ready"}
    assert (a.num_closed, b.num_closed) == (0, 1)
    assert "model b: unloading (evicted for c)" in caplog.text
    assert bench.beats[-1].counters['triptych_model_unloads_total{model="b"}'] == 1
    ledger.check()


def test_several_models_give_way_to_a_large_one() -> None:
    ledger = Ledger(100)
    small = [loader(f"small{n}", ledger, 30) for n in range(3)]
    bench = LoadBench(*small, loader("large", ledger, 90), ledger=ledger, config=FIRST_USE)
    for n in range(3):
        bench.submit(f"job{n}", f"small{n}")
    bench.finish("job0", "job1", "job2")
    bench.submit("job", "large")
    bench.finish("job")
    assert bench.codes("job") == [None]
    assert [model.num_closed for model in small] == [1, 1, 1]


def test_a_busy_model_does_not_give_way() -> None:
    ledger = Ledger(100)
    bench = LoadBench(
        loader("busy", ledger, 80), loader("other", ledger, 80), ledger=ledger, config=FIRST_USE
    )
    bench.submit("long", "busy", num_frames=500)
    bench.run_for(0.1)
    bench.submit("short", "other")
    bench.finish("short")
    assert bench.codes("short") == ["overloaded"]
    final = bench.outputs.final("short")
    assert final is not None
    assert final.error is not None
    assert final.error.retry_after_s is not None
    bench.finish("long")
    assert bench.codes("long") == [None]
    bench.submit("again", "other")
    bench.finish("again")
    assert bench.codes("again") == [None]


@pytest.mark.parametrize("config", [FIRST_USE, Config()], ids=["first-use", "startup"])
def test_a_model_that_can_never_fit_is_reported_at_the_start_and_refused_at_once(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(100)
    chat, huge = loader("chat", ledger, 40), loader("huge", ledger, 200)
    bench = LoadBench(huge, chat, ledger=ledger, config=config)
    bench.engine._models.start()
    bench.run_for(1.0)
    assert "huge can never fit" in caplog.text
    assert "--device-memory-utilization" in caplog.text
    assert bench.states()["huge"] == "failed"
    (status,) = (each for each in bench.beats[-1].models if each.model == "huge")
    assert status.error is not None
    assert status.error.code == "model_too_large"
    bench.submit("first", "chat")
    bench.finish("first")
    num_loads = huge.num_loads
    for number in range(3):
        bench.submit(f"job{number}", "huge")
        bench.finish(f"job{number}")
        bench.run_for(2 * RETRY_FAILED_AFTER_S)
    assert bench.codes("job0", "job1", "job2") == ["model_too_large"] * 3
    assert huge.num_loads == num_loads, "not tried again"
    assert (bench.states()["chat"], chat.num_closed) == ("ready", 0), "nothing gave way"
    outcomes: list[TriptychError | None] = []
    bench.engine.change(LoadModel("huge"), outcomes.append)
    bench.run_for(1.0)
    assert [getattr(outcome, "code", None) for outcome in outcomes] == ["model_too_large"]


@pytest.mark.parametrize("config", [FIRST_USE, Config()], ids=["first-use", "startup"])
def test_a_model_whose_weights_alone_would_fit_pushes_nothing_out_either(config: Config) -> None:
    class InParts(FakeLoader):
        """Its weights take 70 of 100 and its cache 60; beside another the weights are refused."""

        def load(self, report: Callable[[float], None]) -> LoadedModel:
            self.num_loads += 1
            with ExitStack() as stack:
                for part, num_bytes in (("weights", 70), ("kv", 60)):
                    stack.enter_context(ledger.reserve(f"huge/{part}", num_bytes))
            raise AssertionError("it does not fit")

    ledger = Ledger(100)
    chat = loader("chat", ledger, 40)
    huge = InParts("huge", lambda: (FakeFrames("huge"), FrameRunner()), ledger, 130)
    bench = LoadBench(chat, huge, ledger=ledger, config=config)
    bench.engine.change(LoadModel("chat"), lambda error: None)
    bench.run_for(1.0)
    bench.engine._models.start()
    bench.submit("job", "huge")
    bench.finish("job")
    bench.run_for(1.0)
    assert bench.codes("job") == ["model_too_large"]
    assert bench.states() == {"chat": "ready", "huge": "failed"}
    assert chat.num_closed == 0
    ledger.check()


def test_a_model_of_unknown_size_that_can_never_fit_pushes_nothing_out() -> None:
    class Unmeasured(FakeLoader):
        def check_size(self) -> None:
            raise WeightsError("unreadable")

    ledger = Ledger(100)
    chat = loader("chat", ledger, 40)
    huge = Unmeasured("huge", lambda: (FakeFrames("huge"), FrameRunner()), ledger, 200)
    bench = LoadBench(chat, huge, ledger=ledger, config=FIRST_USE)
    bench.engine._models.start()
    for job_id, model in (("first", "chat"), ("job", "huge")):
        bench.submit(job_id, model)
        bench.finish(job_id)
    bench.run_for(1.0)
    assert bench.codes("first", "job") == [None, "model_too_large"]
    assert bench.states() == {"chat": "ready", "huge": "failed"}
    assert chat.num_closed == 0


@pytest.mark.parametrize("config", [FIRST_USE, Config()], ids=["first-use", "startup"])
def test_a_start_without_room_for_any_model_is_refused(config: Config) -> None:
    ledger = Ledger(100)
    models = [loader(name, ledger, 200) for name in ("huge", "vast")]
    bench = LoadBench(*models, ledger=ledger, config=config)
    with pytest.raises(ModelTooLarge, match="can never fit"):
        bench.engine.run()


def test_failed_load_is_reported_and_can_be_retried() -> None:
    chat = loader("chat")
    chat.errors = [WeightsError("model.safetensors: tensor norm.weight has the wrong shape")]
    bench = LoadBench(chat, config=FIRST_USE)
    bench.submit("first", "chat")
    bench.finish("first")
    assert bench.codes("first") == ["weights_error"]
    bench.submit("soon", "chat")
    bench.finish("soon")
    assert bench.codes("soon") == ["weights_error"]
    assert chat.num_loads == 1, "not hammered"
    bench.run_for(RETRY_FAILED_AFTER_S)
    bench.submit("later", "chat")
    bench.finish("later")
    assert bench.codes("later") == [None]


def test_a_loader_with_a_bug_fails_its_own_jobs_alone() -> None:
    chat = loader("chat")
    chat.errors = [KeyError("/secret/path")]
    bench = LoadBench(chat, loader("voice"), config=FIRST_USE)
    bench.submit("chat", "chat")
    bench.submit("voice", "voice")
    bench.finish("chat", "voice")
    assert bench.codes("chat", "voice") == ["internal_error", None]


def test_an_idle_model_is_unloaded_and_comes_back() -> None:
    config = Config(models=ModelOptions(load="first-use", idle_unload_s=60.0))
    chat = loader("chat")
    bench = LoadBench(chat, config=config)
    bench.submit("job", "chat")
    bench.finish("job")
    bench.run_for(59.0)
    assert bench.states() == {"chat": "ready"}
    bench.run_for(2.0)
    assert bench.states() == {"chat": "unloaded"}
    bench.submit("again", "chat")
    bench.finish("again")
    assert bench.codes("again") == [None]
    assert (chat.num_loads, chat.num_closed) == (2, 1)


def test_a_model_is_unloaded_by_hand_once_its_jobs_have_ended() -> None:
    chat = loader("chat")
    bench = LoadBench(chat, loader("other"), config=FIRST_USE)
    bench.submit("job", "chat", num_frames=50)
    bench.run_for(0.1)
    bench.engine.change(UnloadModel("chat"))
    bench.engine.change(UnloadModel("nothing"))
    bench.submit("late", "chat")  # it is not lost either
    bench.run_for(0.1)
    assert bench.states()["chat"] == "ready"
    bench.finish("job", "late")
    bench.run_for(0.1)
    assert bench.codes("job", "late") == [None, None]
    assert bench.states() == {"chat": "unloaded", "other": "unloaded"}
    bench.submit("again", "chat")
    bench.finish("again")
    bench.run_for(100.0)
    assert bench.states()["chat"] == "ready"  # the wish was for once
    assert (chat.num_loads, chat.num_closed) == (2, 1)


def test_a_pending_unload_ends_with_a_failed_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = loader("chat")
    chat.errors = [WeightsError("Truncated.")]
    bench = LoadBench(chat, config=FIRST_USE)
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(bench.executors, "load", calls.append)
    bench.submit("job", "chat")
    bench.run_for(0.1)
    bench.engine.change(UnloadModel("chat"))
    bench.run_for(0.1)
    for call in calls:
        call()
    bench.finish("job")
    assert bench.states() == {"chat": "failed"}
    monkeypatch.undo()
    bench.run_for(RETRY_FAILED_AFTER_S)
    bench.submit("again", "chat")
    bench.finish("again")
    bench.run_for(1.0)
    assert bench.states() == {"chat": "ready"}
    (status,) = bench.engine._models.statuses()
    assert status.num_loads == 2


def test_an_unloaded_model_stays_and_the_idle_time_is_reported() -> None:
    bench = LoadBench(loader("chat"), config=FIRST_USE)
    bench.engine.change(UnloadModel("chat"))
    bench.submit("job", "chat")
    bench.finish("job")
    bench.run_for(30.0)
    (status,) = bench.engine._models.statuses()
    assert status.state == "ready"
    assert 29.0 < status.idle_s < 31.0


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> tuple[LoadBench, list[Callable[[], None]]]:
    """`chat` is idle, `image` lacks room beside it; loads and unloads wait for their turn."""
    ledger = Ledger(100)
    config = Config(models=ModelOptions(load="first-use", idle_unload_s=60.0))
    bench = LoadBench(
        loader("chat", ledger, 80), loader("image", ledger, 80), ledger=ledger, config=config
    )
    bench.submit("first", "chat")
    bench.finish("first")
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(bench.executors, "load", calls.append)
    monkeypatch.setattr(bench.executors, "run", calls.append)
    return bench, calls


def test_a_load_without_room_waits_for_a_model_that_is_leaving(
    pressed: tuple[LoadBench, list[Callable[[], None]]],
) -> None:
    bench, calls = pressed
    bench.run_for(59.0)
    bench.submit("job", "image")
    bench.run_for(2.0)
    load, unload = calls
    load()
    bench.run_for(1.0)
    assert bench.outputs.final("job") is None
    assert bench.states() == {"chat": "unloaded", "image": "loading"}
    unload()
    bench.run_for(1.0)
    calls[2]()
    bench.finish("job")
    assert bench.codes("job") == [None]


def test_a_load_without_waiting_jobs_evicts_no_model(
    pressed: tuple[LoadBench, list[Callable[[], None]]],
) -> None:
    bench, calls = pressed
    bench.submit("job", "image")
    bench.run_for(1.0)
    bench.engine.cancel(["job"])
    (load,) = calls
    load()
    bench.run_for(1.0)
    assert bench.states() == {"chat": "ready", "image": "unloaded"}
    assert len(calls) == 1


def test_what_a_failed_load_had_brought_in_goes_with_it() -> None:
    brought: list[weakref.ref[object]] = []

    class Halfway(FakeLoader):
        def load(self, report: Callable[[float], None]) -> LoadedModel:
            weights = FrameRunner()
            brought.append(weakref.ref(weights))
            raise WeightsError("truncated") from ValueError("short read")

    bench = LoadBench(
        Halfway("chat", lambda: (FakeFrames("chat"), FrameRunner())), config=FIRST_USE
    )
    outcomes: list[TriptychError | None] = []
    bench.engine.change(LoadModel("chat"), outcomes.append)
    bench.run_for(1.0)
    assert isinstance(outcomes[0], WeightsError)
    assert brought[0]() is None


def test_load_asked_for_reports_how_it_went() -> None:
    chat, broken = loader("chat"), loader("broken")
    broken.errors = [WeightsError("truncated")]
    bench = LoadBench(chat, broken, config=FIRST_USE)
    outcomes: list[tuple[str, TriptychError | None]] = []
    for name in ("chat", "chat", "broken", "nothing"):
        note = partial(lambda name, error: outcomes.append((name, error)), name)
        bench.engine.change(LoadModel(name), note)
    bench.run_for(1.0)
    reported = {name: getattr(error, "code", None) for name, error in outcomes}
    assert reported == {"chat": None, "broken": "weights_error", "nothing": "not_found"}
    assert len(outcomes) == 4
    assert chat.num_loads == 1


@pytest.fixture
def gated() -> Iterator[tuple[EngineCore, FakeLoader, Recorder]]:
    """An engine on threads: `voice` loads at once, `chat` when its gate opens."""
    slow = loader("chat")
    slow.gate = threading.Event()
    config = Config(
        models=ModelOptions(load="first-use"), schedule=ScheduleOptions(max_queue_size=3)
    )
    engine = EngineCore([slow, loader("voice")], config=config, ledger=Ledger(0))
    thread = threading.Thread(target=engine.run)
    thread.start()
    yield engine, slow, Recorder()
    slow.gate.set()
    engine.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


def put(
    engine: EngineCore, outputs: Recorder, job_id: str, model: str, deadline_s: float | None = None
) -> None:
    now_s = engine.clock()
    engine.submit(
        Job(
            job_id=job_id,
            model=model,
            request=FrameRequest(num_frames=3),
            sink=outputs,
            arrival_s=now_s,
            limit_s=None if deadline_s is None else deadline_s - now_s,
        )
    )


def test_others_serve_while_a_model_loads(gated: tuple[EngineCore, FakeLoader, Recorder]) -> None:
    engine, slow, outputs = gated
    beats: list[Heartbeat] = []
    engine.change(LoadModel("voice"))
    put(engine, outputs, "warm", "voice")
    outputs.wait_final("warm")
    engine.on_beat = beats.append
    put(engine, outputs, "waits", "chat")
    put(engine, outputs, "leaves", "chat")
    eventually(lambda: slow.num_loads == 1)
    for n in range(20):
        put(engine, outputs, f"voice{n}", "voice")
    outputs.wait_final(*(f"voice{n}" for n in range(20)))
    assert outputs.final("waits") is None
    engine.cancel(["leaves"])
    outputs.wait_final("leaves")
    eventually(lambda: bool(beats) and beats[-1].phase == "load")
    reported = ModelStatus(model="chat", state="loading", progress=0.5, num_loads=1)
    eventually(lambda: reported in beats[-1].models)
    assert slow.gate is not None
    slow.gate.set()
    outputs.wait_final("waits")
    assert outputs.error_code("waits") is None


def test_jobs_waiting_for_a_load_are_bounded_and_expire(
    gated: tuple[EngineCore, FakeLoader, Recorder],
) -> None:
    engine, slow, outputs = gated
    put(engine, outputs, "late", "chat", deadline_s=engine.clock() - 1.0)
    outputs.wait_final("late")
    assert outputs.error_code("late") == "request_timeout"
    for n in range(4):
        put(engine, outputs, f"job{n}", "chat")
    outputs.wait_final("job3")
    assert outputs.error_code("job3") == "overloaded"
    assert slow.gate is not None
    slow.gate.set()
    outputs.wait_final("job0", "job1", "job2")
    assert [outputs.error_code(f"job{n}") for n in range(3)] == [None, None, None]


def test_counts_go_on_where_a_model_is_loaded_again() -> None:
    lives = iter([Chat(), Chat()])

    def make() -> tuple[TokenScheduler, FakeRunner]:
        chat = next(lives)
        return chat.scheduler, chat.runner

    config = Config(models=ModelOptions(load="first-use", idle_unload_s=60.0))
    world = World([FakeLoader("chat", make)], config=config)
    series = 'triptych_output_tokens_total{model="chat"}'
    world.submit("a", "chat", ask(prompt_of(1), 3))
    world.finish("a")
    world.turn_until(lambda: world.beats[-1].models[0].state == "unloaded")
    world.turn_until(lambda: world.beats[-1].counters.get(series) == 3)
    world.submit("b", "chat", ask(prompt_of(2), 4))
    world.finish("b")
    world.turn_until(lambda: world.beats[-1].counters[series] == 7)
