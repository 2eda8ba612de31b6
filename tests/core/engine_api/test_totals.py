"""Counters go on where an engine was restarted."""

from __future__ import annotations

from triptych.core.engine_api.reports import Heartbeat
from triptych.core.engine_api.totals import RunningTotals


def beat(count: float, *, gauge: float = 1.0, **counters: float) -> Heartbeat:
    return Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=0,
        models=(),
        gauges={"g": gauge},
        counters={"c": count, **counters},
        histograms={"h": [count, 0.0, count]},
    )


def test_totals_are_those_of_all_engines() -> None:
    totals = RunningTotals()
    assert totals.add(beat(3)) == beat(3)
    totals.add(beat(5, other=2))
    totals.restart()
    first = totals.add(beat(1, gauge=7.0))
    assert (first.counters, first.gauges) == ({"c": 6, "other": 2}, {"g": 7.0})
    assert first.histograms == {"h": [6, 0, 6]}
    assert totals.add(beat(2)).counters == {"c": 7, "other": 2}
    totals.restart()
    totals.restart()  # an engine that sent nothing
    assert totals.add(beat(1)).counters == {"c": 8, "other": 2}
