"""The rows and tokens of a step that the engine chooses."""

from __future__ import annotations

import pytest

from triptych.core.options.batch_limits import MOST_ROWS, with_batch_limits
from triptych.core.options.config import ScheduleOptions

GIB = 2**30


@pytest.mark.parametrize(
    ("left_gib", "rows", "tokens"),
    [
        (60, 256, 8192),
        (20, 256, 8192),
        (19, 128, 4096),
        (5, 64, 2048),
        (4, 32, 1024),
        (-3, 32, 1024),
    ],
)
def test_a_gpu_takes_what_its_memory_allows(left_gib: int, rows: int, tokens: int) -> None:
    chosen = with_batch_limits(ScheduleOptions(), is_cpu=False, left_bytes=left_gib * GIB)
    assert (chosen.max_batch_size, chosen.max_batch_input_tokens) == (rows, tokens)
    assert chosen.max_batch_size <= MOST_ROWS


def test_a_cpu_takes_little_whatever_its_memory() -> None:
    chosen = with_batch_limits(ScheduleOptions(), is_cpu=True, left_bytes=500 * GIB)
    assert (chosen.max_batch_size, chosen.max_batch_input_tokens) == (32, 1024)


@pytest.mark.parametrize("is_cpu", [False, True])
def test_a_given_limit_is_kept_and_the_other_chosen(is_cpu: bool) -> None:
    rows = with_batch_limits(ScheduleOptions(max_batch_size=7), is_cpu=is_cpu, left_bytes=40 * GIB)
    assert (rows.max_batch_size, rows.max_batch_input_tokens) == (7, 1024 if is_cpu else 8192)
    tokens = with_batch_limits(
        ScheduleOptions(max_batch_input_tokens=9), is_cpu=is_cpu, left_bytes=40 * GIB
    )
    assert (tokens.max_batch_size, tokens.max_batch_input_tokens) == (32 if is_cpu else 256, 9)
