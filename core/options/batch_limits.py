"""Rows and tokens of a step, where the user leaves them to the engine.

Owns the table by device. Knows no models: the memory that their weights leave is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.core.options.config import ScheduleOptions


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a step for a GPU on which at least `left_bytes` are left by weights."""

    left_bytes: int
    max_batch_size: int
    max_batch_input_tokens: int


_GIB = 2**30
_LEAST = BatchLimits(0, 32, 1024)
_ON_GPU = (
    BatchLimits(20 * _GIB, 256, 8192),
    BatchLimits(10 * _GIB, 128, 4096),
    BatchLimits(5 * _GIB, 64, 2048),
)
"""A step of an 8B model in bfloat16 takes 1.5 GiB for 8,192 tokens; its 256 rows of 500 tokens take
16 GiB of cache, and wait for pages where there are fewer."""
MOST_ROWS, LEAST_ROWS = _ON_GPU[0].max_batch_size, _LEAST.max_batch_size


def with_batch_limits(
    schedule: ScheduleOptions, *, is_cpu: bool, left_bytes: int
) -> ScheduleOptions:
    """`schedule` with each limit that is 0 chosen by the device.

    A CPU computes so slowly that more rows or tokens would only delay one another.
    """
    fitting = (each for each in _ON_GPU if each.left_bytes <= left_bytes)
    chosen = _LEAST if is_cpu else next(fitting, _LEAST)
    return replace(
        schedule,
        max_batch_size=schedule.max_batch_size or chosen.max_batch_size,
        max_batch_input_tokens=schedule.max_batch_input_tokens or chosen.max_batch_input_tokens,
    )
