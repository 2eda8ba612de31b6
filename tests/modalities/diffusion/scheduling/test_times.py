"""How long runs take, as far as it is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from triptych.modalities.diffusion.scheduling.times import RunTimes


def learned(run_s: Callable[[int], float], *num_rows: int, num_tokens: int = 64) -> RunTimes:
    times = RunTimes(max_rows=8)
    for rows in num_rows * 2:
        times.observe(num_tokens, rows, run_s(rows))
    return times


def test_times_are_interpolated_between_measured_row_counts() -> None:
    table = learned(lambda rows: 0.01 * rows**2, 1, 3, 8).table(64)
    assert [table[0], table[2], table[7]] == pytest.approx([0.01, 0.09, 0.64])
    assert table[1] == pytest.approx(0.05)
    assert table[5] == pytest.approx(0.09 + 0.55 * 3 / 5)


def test_beyond_a_row_is_thought_a_little_cheaper_and_will_be_tried() -> None:
    table = learned(lambda rows: 0.01 * rows, 4).table(64)
    per_row = [seconds / rows for rows, seconds in enumerate(table, start=1)]
    assert per_row[3] == pytest.approx(0.01)
    assert all(0.009 < seconds < 0.01 for seconds in per_row[:3] + per_row[4:])
    assert per_row[0] < per_row[1] < per_row[3] > per_row[4] > per_row[7]


def test_another_size_takes_as_long_as_its_tokens() -> None:
    times = learned(lambda rows: 0.01 + 0.01 * rows, 1, 4, num_tokens=64)
    for _ in range(2):
        times.observe(4096, 1, 3.0)
    assert times.of(128, 4) == pytest.approx(2 * times.of(64, 4))
    assert times.of(3000, 1) == pytest.approx(3.0 * 3000 / 4096)


def test_before_anything_is_known_more_rows_are_worth_a_try() -> None:
    table = RunTimes(max_rows=8).table(64)
    assert min(range(8), key=lambda at: table[at] / (at + 1)) == 7


def test_a_slow_first_run_and_a_disturbed_one_say_nothing() -> None:
    times = RunTimes(max_rows=8)
    for seconds in (60.0, 0.01, 0.5, 0.011):
        times.observe(64, 2, seconds)
    assert times.of(64, 2) == pytest.approx(0.01)
    for _ in range(5):
        times.observe(64, 2, 0.03)
    assert times.of(64, 2) == pytest.approx(0.03), "but what lasts is learned"


def test_what_was_not_run_for_long_is_tried_again() -> None:
    """Eight rows were slow while something else had the device; later they are not."""
    times = learned(lambda rows: 0.01 if rows == 1 else 1.0, 1, 8)
    assert times.of(64, 8) == pytest.approx(1.0)
    for _ in range(260):
        times.observe(64, 1, 0.01)
    assert times.of(64, 8) < 8 * 0.01


def test_only_so_many_sizes_are_remembered() -> None:
    times = RunTimes(max_rows=2)
    for num_tokens in range(1, 1000):
        for _ in range(2):
            times.observe(num_tokens, 1, float(num_tokens))
    assert times.of(999, 1) == pytest.approx(999.0)
    assert times.of(1, 1) == pytest.approx(1.0)
    assert len(times._sizes) < 100
    assert all(math.isfinite(seconds) for seconds in times.table(10**9))
