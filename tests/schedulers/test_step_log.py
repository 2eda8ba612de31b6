"""Steps for watchers: merged where they are short, bounded, reported when they are due."""

from __future__ import annotations

import math

import pytest

from triptych.core.engine_api.reports import RunningStep, StepRecord
from triptych.schedulers.step_log import MAX_SPANS, MERGE_S, REPORT_S, StepLog

RUNNING = RunningStep(model="m", kind="denoise", start_s=1.0)


def step(start_s: float, length_s: float, kind: str = "decode", num_rows: int = 2) -> StepRecord:
    return StepRecord(
        model="m",
        kind=kind,
        num_rows=num_rows,
        start_s=start_s,
        length_s=length_s,
        busy_s=length_s,
    )


@pytest.fixture
def log() -> StepLog:
    log = StepLog()
    log.switch(True)
    return log


def test_short_steps_of_a_kind_are_one(log: StepLog) -> None:
    for n in range(100):
        log.note(step(n * 0.002, 0.001))
        log.note(step(n * 0.002 + 0.001, 0.001, kind="prefill"))
    steps = log.report(None, 0.2).steps
    assert len(steps) == 2 * 0.2 / MERGE_S
    assert [each.kind for each in steps] == ["decode", "prefill"] * 4
    assert sum(each.num_steps for each in steps) == 200
    assert sum(each.num_rows for each in steps) == 400
    assert math.isclose(sum(each.busy_s for each in steps), 0.2)
    first = steps[0]
    assert (first.num_steps, first.start_s) == (25, 0.0)
    assert first.length_s == pytest.approx(0.049)
    assert first.busy_s == pytest.approx(0.025)


@pytest.mark.parametrize("long_first", [True, False])
def test_long_steps_stand_alone(log: StepLog, long_first: bool) -> None:
    lengths = (0.02, 0.001) if long_first else (0.001, 0.02)
    log.note(step(0.0, lengths[0]))
    log.note(step(lengths[0], lengths[1]))
    assert [each.num_steps for each in log.report(None, 1.0).steps] == [1, 1]


def test_a_failed_step_stands_alone(log: StepLog) -> None:
    for n in range(3):
        span = step(n * 0.001, 0.001)
        span.is_failed = n == 1
        log.note(span)
    assert [each.is_failed for each in log.report(None, 1.0).steps] == [False, True, False]


def test_the_oldest_steps_make_room(log: StepLog) -> None:
    for n in range(MAX_SPANS + 10):
        log.note(step(float(n), 0.5))
    report = log.report(None, 9e9)
    assert (len(report.steps), report.num_dropped) == (MAX_SPANS, 10)
    assert report.steps[0].start_s == 10.0
    assert log.report(None, 9e9).num_dropped == 0


def test_nothing_grows_after_it_was_reported(log: StepLog) -> None:
    log.note(step(0.0, 0.001))
    (reported,) = log.report(None, 0.001).steps
    log.note(step(0.001, 0.001))
    assert reported.num_steps == 1


def test_a_report_is_due_where_there_is_something_to_report(log: StepLog) -> None:
    assert log.due_s(is_running=False) == math.inf
    log.note(step(1.0, 0.01))
    assert log.due_s(is_running=False) <= 1.01, "the first one at once"
    log.report(RUNNING, 2.0)
    assert log.due_s(is_running=True) == 2.0 + REPORT_S
    assert log.due_s(is_running=False) == 2.0 + REPORT_S, "that it runs no more is news, too"
    log.report(None, 3.0)
    assert log.due_s(is_running=False) == math.inf


def test_switching_off_forgets(log: StepLog) -> None:
    log.note(step(1.0, 0.01))
    log.switch(False)
    assert not log.is_on
    assert log.due_s(is_running=False) == math.inf
