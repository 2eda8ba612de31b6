"""The engine process: what it says of its start, and what it leaves for after it."""

from __future__ import annotations

from triptych.core.transport.control import Beat, ControlLine, FromChild, Phase, Ready
from triptych.core.transport.messages import Heartbeat, ModelState, ModelStatus
from triptych.engine_process import StartReport


class Line(ControlLine):
    """A supervisor's that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[FromChild] = []

    def send(self, message: FromChild) -> None:
        self.told.append(message)


def beat(state: ModelState) -> Heartbeat:
    return Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=0,
        models=(ModelStatus(model="chat", state=state),),
        gauges={},
        counters={},
        histograms={},
    )


def test_what_can_wait_begins_once_when_all_is_ready() -> None:
    line = Line()
    begun: list[int] = []
    report = StartReport(line, lambda: begun.append(len(line.told)))
    report.take(beat("loading"))
    assert not begun
    for _ in range(2):
        report.take(beat("ready"))
    kinds = [type(message) for message in line.told]
    assert kinds == [Beat, Beat, Phase, Ready, Beat]
    assert begun == [4], "after the supervisor knows"
