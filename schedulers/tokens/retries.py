"""Rows of steps that ran out of memory: they are computed again before all other work.

Owns which rows these are, and in which parts they are computed. Rows without recurrent states are
retried in the two halves of their step. A failed step may have changed recurrent states: rows that
have them begin again at their last snapshots, one after the other and with no other row in the
step, until the positions that failed are computed. So a row fails only where it has no room alone.
Knows no pages and no policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.schedulers.tokens.scheduled_row import ScheduledRow
    from triptych.schedulers.tokens.state import SequenceState

_LEAST_TOKENS = 64
"""Of a row that begins again: whole contexts are computed before any other row goes on."""


class Retries:
    """Parts of failed steps, in the order in which they are retried.

    `restarts` are rows that begin again, with the end of the positions that failed; a step takes
    `max_tokens` of the first of them.
    """

    def __init__(self) -> None:
        self.groups: deque[list[ScheduledRow]] = deque()
        self.restarts: dict[SequenceState, int] = {}
        self.max_tokens = 0

    def halve(self, pieces: Iterable[ScheduledRow]) -> None:
        """Retry the rows of a failed step in two steps; a paused row goes on when it resumes."""
        pieces = [piece for piece in pieces if not piece.unit.is_paused]
        half = -(-len(pieces) // 2)
        self.groups.extend(group for group in (pieces[:half], pieces[half:]) if group)

    def restart(self, pieces: Sequence[ScheduledRow]) -> None:
        """Let the rows of a failed step begin again, each in steps of half its tokens.

        Without rows, those of a step that depended on a failed one, nothing changes.
        """
        if not self.restarts:
            self.max_tokens = _LEAST_TOKENS
        self.max_tokens = max(self.max_tokens, sum(piece.num_tokens for piece in pieces) // 2)
        for piece in pieces:
            piece.unit.is_spoiled = True
            if not piece.unit.is_paused:
                self.restarts[piece.unit] = piece.known_end

    def settle(self, row: SequenceState) -> None:
        """End the restart of a row that has computed what failed."""
        if row.num_committed >= self.restarts.get(row, 0):
            self.restarts.pop(row, None)

    def drop(self, row: SequenceState) -> None:
        """Forget a row that is paused, or over."""
        self.restarts.pop(row, None)
        for group in self.groups:
            group[:] = [piece for piece in group if piece.unit is not row]
        self.groups = deque(group for group in self.groups if group)
