"""How long runs take, as far as it is known, and which numbers of rows are worth a try."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from triptych.modalities.diffusion.scheduling.batching import run_table
from triptych.modalities.diffusion.scheduling.policy import denoise_work
from triptych.schedulers.cost import UNKNOWN_COST_S, CostModel


def learned(run_s: Callable[[int], float], *num_rows: int) -> CostModel:
    costs = CostModel()
    for rows in num_rows * 2:
        costs.observe("denoise", work(rows), run_s(rows))
    return costs


def work(num_rows: int) -> dict[str, float]:
    return denoise_work(num_rows, 64 * num_rows)


def table(costs: CostModel) -> list[float]:
    return run_table(
        [costs.measured_s("denoise", work(rows)) for rows in range(1, 9)], UNKNOWN_COST_S
    )


def test_times_are_interpolated_between_measured_row_counts() -> None:
    run_s = table(learned(lambda rows: 0.01 * rows**2, 1, 3, 8))
    assert [run_s[0], run_s[2], run_s[7]] == pytest.approx([0.01, 0.09, 0.64])
    assert run_s[1] == pytest.approx(0.05)
    assert run_s[5] == pytest.approx(0.09 + 0.55 * 3 / 5)


def test_beyond_a_row_is_estimated_a_little_cheaper_and_will_be_tried() -> None:
    run_s = table(learned(lambda rows: 0.01 * rows, 4))
    per_row = [seconds / rows for rows, seconds in enumerate(run_s, start=1)]
    assert per_row[3] == pytest.approx(0.01)
    assert all(0.009 < seconds < 0.01 for seconds in per_row[:3] + per_row[4:])
    assert per_row[0] < per_row[1] < per_row[3] > per_row[4] > per_row[7]


def test_before_anything_is_known_more_rows_are_worth_a_try() -> None:
    run_s = table(CostModel())
    assert min(range(8), key=lambda at: run_s[at] / (at + 1)) == 7


def test_a_slow_first_run_and_a_disturbed_one_say_nothing() -> None:
    costs = CostModel()
    for seconds in (60.0, 0.01, 0.5, 0.011):
        costs.observe("denoise", work(2), seconds)
    assert costs.predict("denoise", work(2)) == pytest.approx(0.011)
    for _ in range(5):
        costs.observe("denoise", work(2), 0.03)
    assert costs.predict("denoise", work(2)) == pytest.approx(0.03), "but what lasts is learned"


def test_steps_that_scatter_are_expected_to_take_their_median() -> None:
    """The shortest would overrun every gap that it just fits."""
    costs = CostModel()
    for seconds in (0.010, 0.014, 0.008, 0.013, 0.012):
        costs.observe("denoise", work(2), seconds)
    assert costs.predict("denoise", work(2)) == 0.012


def test_what_was_not_run_for_long_is_tried_again() -> None:
    """Eight rows were slow while something else had the device; later they are not."""
    costs = learned(lambda rows: 0.01 if rows == 1 else 1.0, 1, 8)
    assert table(costs)[7] == pytest.approx(1.0)
    for _ in range(260):
        costs.observe("denoise", work(1), 0.01)
    assert costs.measured_s("denoise", work(8)) is None
    assert table(costs)[7] < 8 * 0.01


def test_only_so_many_works_are_remembered() -> None:
    costs = CostModel()
    for num_tokens in range(1, 1000):
        for _ in range(2):
            costs.observe("denoise", denoise_work(1, num_tokens), float(num_tokens))
    assert costs.predict("denoise", denoise_work(1, 999)) == pytest.approx(999.0)
    assert costs.measured_s("denoise", denoise_work(1, 1)) is None
    (learner,) = costs._costs.values()
    assert len(learner._latest) <= 256
