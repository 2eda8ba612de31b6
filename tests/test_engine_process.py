"""The engine process: what it says of its start, and what it leaves for after it."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from triptych.core.engine_api.reports import Heartbeat, ModelState, ModelStatus
from triptych.core.errors import ModelTooLarge, WeightsError, to_info
from triptych.core.ledger import Ledger
from triptych.core.process.metrics import DEVICE_BYTES, series
from triptych.core.transport.control import (
    Beat,
    ControlLine,
    FromChild,
    ModelNote,
    Phase,
    Ready,
    StartFacts,
)
from triptych.engine_process import StartReport, keep_budget


class Line(ControlLine):
    """A supervisor's pipe that keeps its messages."""

    def __init__(self) -> None:
        self.sent: list[FromChild] = []

    def send(self, message: FromChild) -> None:
        self.sent.append(message)


def beat(state: ModelState, *others: ModelStatus, phase: str = "idle") -> Heartbeat:
    return Heartbeat(
        turn=1,
        phase=phase,
        stall_budget_s=1.0,
        num_jobs=0,
        models=(ModelStatus(model="chat", state=state), *others),
        gauges={},
        counters={},
        histograms={},
    )


def test_what_can_wait_begins_once_when_all_is_ready() -> None:
    line = Line()
    begun: list[int] = []
    report = StartReport(line, lambda: begun.append(len(line.sent)))
    report.take(beat("loading"))
    assert not begun
    for _ in range(2):
        report.take(beat("ready"))
    kinds = [type(message) for message in line.sent]
    assert kinds == [Beat, ModelNote, Beat, ModelNote, Phase, Ready, Beat]
    assert begun == [6], "after the supervisor knows"


def test_a_model_s_state_is_sent_when_it_changes_with_its_memory() -> None:
    line = Line()
    report = StartReport(line, lambda: None)
    loading = ModelStatus(model="chat", state="loading", progress=0.31)
    held = {
        series(DEVICE_BYTES, owner="chat/weights"): 100.0,
        series(DEVICE_BYTES, owner="chat/kv"): 20.0,
        series(DEVICE_BYTES, owner="chat/more/kv"): 7.0,
    }
    for status in (loading, structs.replace(loading, progress=0.33)):
        report.take(structs.replace(beat("loading"), models=(status,), gauges=held))
    report.take(structs.replace(beat("ready"), gauges=held))
    notes = [note for note in line.sent if isinstance(note, ModelNote)]
    assert [(note.status.state, note.status.progress) for note in notes] == [
        ("loading", 0.3),
        ("ready", 0.0),
    ]
    assert [note.memory_bytes for note in notes] == [0, 120], "of this model, once it is loaded"


def test_a_model_that_waits_for_others_is_sent_once() -> None:
    line = Line()
    report = StartReport(line, lambda: None)
    loading = ModelStatus(model="image", state="loading")
    for idle_s in (0.0, 0.5, 1.0):
        ready = ModelStatus(model="chat", state="ready", idle_s=idle_s)
        report.take(structs.replace(beat("ready"), models=(ready, loading)))
    assert [each.name for each in line.sent if isinstance(each, Phase)] == ["load"]
    assert sum(isinstance(each, ModelNote) for each in line.sent) == 2


@pytest.mark.parametrize("state", ["failed", "ready"])
def test_a_start_that_ends_was_never_ready(state: ModelState) -> None:
    """Its supervisor would start it again and again, where it says why it cannot."""
    line = Line()
    report = StartReport(line, lambda: None)
    report.take(beat("loading"))
    report.take(beat(state, phase="stop"))
    assert [type(message) for message in line.sent] == [Beat, ModelNote, Beat]


def test_a_later_start_shares_out_as_much_memory_as_the_first() -> None:
    line, first = Line(), Ledger(900, free_bytes=1000)
    keep_budget(line, first, 0)
    assert line.sent == [StartFacts({"device_budget_bytes": 900})]
    for free_bytes, capacity_bytes in ((2000, 900), (950, 900), (900, 900), (500, 500)):
        later = Ledger(int(free_bytes * 0.9), free_bytes=free_bytes)
        keep_budget(line, later, 900)
        assert later.capacity_bytes == capacity_bytes
    assert len(line.sent) == 1


def test_a_start_is_over_without_the_models_that_never_fit_unless_there_is_no_other() -> None:
    too_large = ModelStatus(model="huge", state="failed", error=to_info(ModelTooLarge("No room.")))
    unfit = ModelStatus(model="bad", state="failed", error=to_info(WeightsError("Truncated.")))
    for others, is_over in (((too_large,), True), ((unfit,), False), ((too_large, unfit), False)):
        line = Line()
        StartReport(line, lambda: None).take(beat("ready", *others))
        assert (Ready() in line.sent) == is_over
    line = Line()
    alone = msgspec.structs.replace(beat("ready"), models=(too_large,))
    StartReport(line, lambda: None).take(alone)
    assert Ready() not in line.sent
