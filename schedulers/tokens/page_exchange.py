"""Hooks that the token scheduler calls so that pages come and go.

Owns the interface and its empty implementation. `schedulers.roles` implements it for other engines,
`schedulers.tokens.stored_pages` for lower tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.core.engine_api.job import Job
from triptych.core.errors import UnsupportedOption
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

    def on_answer(self, row: SequenceState) -> None:
        """React to a row whose prompt is computed."""

    def on_preempt(self, row: SequenceState) -> None:
        """React to a row that is about to lose its pages, and waits again."""

    def on_end(self, row: SequenceState) -> None:
        """React to the end of a row."""

    def on_step_end(self) -> None:
        """React to the end of a step."""

    def num_kept(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that are kept elsewhere."""
        return 0

    def pin(self, keys: Sequence[bytes], tenant: str) -> int:
        """Keep pages until they are unpinned or dropped; returns how many of them are kept."""
        raise UnsupportedOption(
            "Pages are pinned in host memory and on disk; the operator starts the server with"
            " --kv-connector local or tiered."
        )

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Let pages give way to others again."""

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove pages that are kept elsewhere."""

    def clear(self) -> None:
        """Remove all pages that are kept elsewhere."""

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of exchanged pages."""
        return stats
