"""Options of schedulers as loaders pass them on."""

from __future__ import annotations

from typing import Any

from triptych.core.options.batch_limits import with_batch_limits
from triptych.core.options.config import ScheduleOptions


def schedule_of(**options: Any) -> ScheduleOptions:
    """The options, with the limits of a CPU where none are given."""
    return with_batch_limits(ScheduleOptions(**options), is_cpu=True, left_bytes=0)
