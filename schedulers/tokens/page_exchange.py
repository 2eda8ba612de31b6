"""Hooks that the token scheduler calls so that engines can exchange pages.

Owns the interface and its empty implementation. `schedulers.roles` implements it.
"""

from __future__ import annotations

from collections.abc import Callable

from triptych.core.engine_api.job import Job
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.executors import Post
from triptych.schedulers.tokens.state import SequenceState


class PageExchange:
    """Hooks called by the scheduler. This base class does nothing."""

    def connect(self, post: Post) -> None:
        """Learn how other threads reach the loop's."""

    def attach(self, submit: Callable[[Job], None]) -> None:
        """Learn how jobs of the engine's own are run."""

    def on_submit(self, row: SequenceState) -> None:
        """A row waits for its turn."""

    def on_end(self, row: SequenceState) -> None:
        """A row has ended."""

    def on_step_end(self) -> None:
        """A step is over."""

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with what was exchanged."""
        return stats
