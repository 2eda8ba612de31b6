"""Models are added, removed and put to sleep while the engine runs."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from support.engine_seams import FakeFrames, FakeLoader, FrameRunner
from support.load_bench import LoadBench
from triptych.core.engine_api.model_changes import (
    AddModel,
    KeepModel,
    KeptChanges,
    LoadModel,
    ModelChange,
    RemoveModel,
    Sleep,
    UnloadModel,
    Wake,
)
from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ModelTooLarge, TriptychError, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, ModelOptions
from triptych.schedulers.late_loader import LateLoader

FIRST_USE = Config(models=ModelOptions(load="first-use"))


def model(name: str) -> ResolvedModel:
    return ResolvedModel(name=name, reference=name, folder="/none", digest="00")


class ChangeBench(LoadBench):
    """An engine whose models change; outcomes are the codes of errors, by change."""

    def __init__(self, *names: str) -> None:
        ledger = Ledger(100)
        self.loaders = {
            name: FakeLoader(
                name,
                lambda name=name: (FakeFrames(name), FrameRunner()),  # type: ignore[misc]
                ledger=ledger,
                num_bytes=200 if name == "huge" else 10,
            )
            for name in ("chat", "image", "huge", "bad")
        }
        super().__init__(*(self.loaders[n] for n in names), ledger=ledger, config=FIRST_USE)
        self.engine.open_loader = partial(LateLoader, self._open)
        self.outcomes: list[str | None] = []

    def _open(self, resolved: ResolvedModel) -> FakeLoader:
        if resolved.name == "bad":
            raise WeightsError("It has no config.json.")
        return self.loaders[resolved.name]

    def change(self, *changes: ModelChange) -> list[str | None]:
        """Make changes, one after another; return their outcomes."""

        def done(error: TriptychError | None) -> None:
            self.outcomes.append(getattr(error, "code", None))

        before = len(self.outcomes)
        for change in changes:
            self.engine.change(change, done)
        self.run_for(0.1)
        return self.outcomes[before:]


def test_a_model_comes_is_used_and_leaves_and_the_ledger_is_as_before() -> None:
    bench = ChangeBench("chat")
    bench.submit("early", "image")
    assert bench.change(AddModel(model("image"))) == [None]
    assert bench.states() == {"chat": "unloaded", "image": "unloaded"}
    bench.submit("job", "image")
    bench.finish("early", "job")
    assert bench.codes("early", "job") == ["not_found", None]
    assert 100 - bench.ledger.available_bytes == 10
    assert bench.change(RemoveModel("image")) == [None]
    assert (bench.states(), bench.ledger.available_bytes) == ({"chat": "unloaded"}, 100)
    assert bench.change(RemoveModel("image"), LoadModel("image")) == ["not_found"] * 2


def test_a_model_that_came_again_is_not_the_one_of_the_start() -> None:
    """A new API process repeats the removal in an engine that has both changes already."""
    bench = ChangeBench("chat")
    assert bench.change(RemoveModel("chat"), AddModel(model("chat"))) == [None, None]
    bench.submit("job", "chat", num_frames=50)
    bench.run_for(0.1)
    again = (RemoveModel("chat", is_of_start=True), AddModel(model("chat")))
    assert bench.change(*again) == [None, None]
    bench.finish("job")
    assert bench.codes("job") == [None]
    assert bench.states() == {"chat": "ready"}
    first = ChangeBench("chat")
    assert first.change(*again) == [None, None]


def test_a_removed_model_finishes_its_jobs_and_takes_no_others() -> None:
    bench = ChangeBench("chat", "image")
    bench.submit("job", "chat", num_frames=50)
    bench.run_for(0.1)
    assert bench.change(RemoveModel("chat"), AddModel(model("chat"))) == []
    bench.submit("late", "chat")
    bench.finish("job", "late")
    bench.run_for(0.1)
    assert bench.codes("job", "late") == [None, "not_found"]
    assert bench.outcomes == [None, None]  # it left, and came again
    bench.submit("again", "chat")
    bench.finish("again")
    assert bench.codes("again") == [None]


def test_a_model_that_cannot_be_served_is_refused_and_nothing_of_it_stays() -> None:
    bench = ChangeBench("chat")
    assert bench.change(AddModel(model("bad")), AddModel(model("huge"))) == [
        WeightsError.code,
        ModelTooLarge.code,
    ]
    assert bench.states() == {"chat": "unloaded"}
    bench.submit("job", "chat")
    bench.finish("job")
    assert bench.codes("job") == [None]


@pytest.mark.parametrize(("keep_s", "is_kept"), [(5.0, False), (math.inf, True)])
def test_an_idle_model_stays_as_long_as_its_own_time_says(keep_s: float, is_kept: bool) -> None:
    bench = ChangeBench("chat")
    bench.submit("job", "chat")
    bench.finish("job")
    assert bench.change(KeepModel("chat", keep_s)) == [None]
    (status,) = bench.engine._models.statuses()
    assert status.keep_s == (keep_s if keep_s < math.inf else -1)
    bench.run_for(4.0)
    assert bench.states()["chat"] == "ready"
    bench.run_for(2.0)
    assert (bench.states()["chat"] == "ready") == is_kept


@pytest.mark.parametrize("ends_jobs", [False, True])
def test_sleep_frees_the_memory_and_wake_brings_back_what_was_there(ends_jobs: bool) -> None:
    bench = ChangeBench("chat", "image")
    bench.submit("job", "chat", num_frames=50)
    bench.run_for(0.1)
    assert bench.change(Sleep(ends_jobs)) == ([None] if ends_jobs else [])
    bench.submit("late", "image")
    bench.finish("job", "late")
    bench.run_for(0.1)
    assert bench.codes("job", "late") == ["asleep" if ends_jobs else None, "asleep"]
    assert (bench.outcomes, bench.ledger.available_bytes) == ([None], 100)
    assert bench.beats[-1].phase == "sleep"
    assert bench.change(LoadModel("chat"), Wake()) == ["asleep", None]
    assert bench.states() == {"chat": "ready", "image": "unloaded"}
    bench.submit("again", "image")
    bench.finish("again")
    assert bench.codes("again") == [None]


def test_a_later_engine_gets_the_changes_that_still_count() -> None:
    kept = KeptChanges()
    for change in (
        AddModel(model("a")),
        KeepModel("a", 3.0),
        UnloadModel("a"),
        AddModel(model("b")),
        RemoveModel("b"),
        Sleep(),
        Wake(),
        Sleep(),
    ):
        kept.add(change)
    assert kept.changes() == (
        RemoveModel("b", is_of_start=True),
        AddModel(model("a")),
        KeepModel("a", 3.0),
        Sleep(),
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_under_jobs_lose_no_job_and_no_memory(seed: int) -> None:
    bench, chance = ChangeBench("chat"), random.Random(seed)
    jobs: list[str] = []
    for n in range(120):
        name = chance.choice(("chat", "image"))
        changes: list[ModelChange | None] = [
            LoadModel(name),
            UnloadModel(name),
            RemoveModel(name),
            AddModel(model(name)),
            Sleep(chance.random() < 0.5),
            Wake(),
            None,
        ]
        (change,) = chance.choices(changes, (3, 3, 1, 3, 1, 2, 6))
        if change is not None:
            bench.change(change)
            continue
        jobs.append(f"job-{n}")
        bench.submit(jobs[-1], name, num_frames=chance.randint(1, 20))
    bench.change(Wake(), RemoveModel("chat"), RemoveModel("image"))
    bench.finish(*jobs)
    bench.run_for(1.0)
    assert set(bench.codes(*jobs)) <= {None, "not_found", "asleep"}
    assert (bench.states(), bench.ledger.available_bytes) == ({}, 100)
