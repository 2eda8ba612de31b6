"""Hooks that the token scheduler calls so that pages come and go.

Owns the interface and its empty implementation. `schedulers.roles` implements it for other engines,
`schedulers.tokens.stored_pages` for lower tiers.
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
        """Register `post`, which schedules a call on the loop's thread."""

    def attach(self, submit: Callable[[Job], None]) -> None:
        """Register `submit`, which runs a job of the engine itself."""

    def on_submit(self, row: SequenceState) -> None:
        """React to a new row in the queue."""

    def on_preempt(self, row: SequenceState) -> None:
        """React to a row that is about to lose its pages, and waits again."""

    def on_end(self, row: SequenceState) -> None:
        """React to the end of a row."""

    def on_step_end(self) -> None:
        """React to the end of a step."""

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of exchanged pages."""
        return stats
