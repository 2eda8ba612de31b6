"""The metrics snapshot keeps the form it promises."""

from __future__ import annotations

import pytest

from triptych.core.process.metrics import HISTOGRAM_BOUNDS, STEP_SECONDS, Histogram, Metrics, series


def test_series_are_named_as_prometheus_names_them() -> None:
    assert series("triptych_jobs") == "triptych_jobs"
    assert series("triptych_jobs", model="a", kind="b") == 'triptych_jobs{kind="b",model="a"}'
    assert series("x", model='say "hi"\\\n') == 'x{model="say \\"hi\\"\\\\\\n"}'


def test_a_histogram_counts_each_value_in_one_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.snapshot() == [2, 2, 1, pytest.approx(8.65)]


def test_counters_and_histograms_start_on_first_use_and_snapshots_are_copies() -> None:
    metrics = Metrics()
    metrics.add("triptych_steps_total", model="chat")
    metrics.add("triptych_steps_total", 2, model="chat")
    metrics.observe(STEP_SECONDS, 0.02, kind="decode")
    before = metrics.histograms()
    metrics.observe(STEP_SECONDS, 0.02, kind="decode")
    assert metrics.counters == {'triptych_steps_total{model="chat"}': 3}
    (values,) = before.values()
    assert len(values) == len(HISTOGRAM_BOUNDS[STEP_SECONDS]) + 2
    assert sum(values[:-1]) == 1


def test_bounds_rise() -> None:
    for bounds in HISTOGRAM_BOUNDS.values():
        assert list(bounds) == sorted(set(bounds))
