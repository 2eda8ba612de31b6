"""Who gives way for pages and slots, as a step is being chosen.

Owns the order of the rows that may be preempted, and the victims so far. Changes nothing: booking
the step does.
"""

from __future__ import annotations

from collections.abc import Iterator

from triptych.schedulers.tokens.budget import StepBudget
from triptych.schedulers.tokens.state import SequenceState, TokenState


class Preemption:
    """Chooses `victims`; their pages and slots count as free in `budget`."""

    def __init__(self, state: TokenState, budget: StepBudget) -> None:
        self.victims: list[SequenceState] = []
        self._state = state
        self._budget = budget
        self._next = self._in_order()
        self._idle = (row for row in reversed(state.running) if self.is_idle(row))

    def _in_order(self) -> Iterator[SequenceState]:
        """Rows that may be preempted for pages: slow readers, then the newest."""
        newest = list(reversed(self._state.running))
        for row in (*(row for row in newest if row.is_paused), *newest):
            is_kept = self._state.is_protected(row) and not row.is_paused
            if not is_kept and row not in self.victims:
                yield row

    def is_idle(self, row: SequenceState) -> bool:
        """Whether `row` only holds its slot for a slow reader, and may be preempted."""
        is_kept = row.num_in_flight or self._state.is_protected(row)
        return row.is_paused and row not in self._budget.excluded and not is_kept

    def preempt(self, victim: SequenceState) -> None:
        """Preempt one row."""
        self.victims.append(victim)
        self._budget.preempt(victim)

    def preempt_idle(self) -> bool:
        """Preempt the next row with a slow reader for a prompt; false if there is none."""
        victim = next(self._idle, None)
        if victim is not None:
            self.preempt(victim)
        return victim is not None

    def find_pages(self, row: SequenceState, num_positions: int) -> bool:
        """Take pages for the next positions of `row`; false if it must sit this step out."""
        assert row.lease is not None, "a running row holds a lease"
        num_pages = self._state.pool.num_pages_for(row.num_booked + num_positions) - len(row.lease)
        if num_pages <= 0:
            return True
        budget = self._budget
        if budget.num_pages < num_pages:
            budget.is_short = True
            self._preempt_for(row, num_pages)
        if budget.num_pages < num_pages:
            return False
        budget.num_pages -= num_pages
        return True

    def _preempt_for(self, row: SequenceState, num_pages: int) -> None:
        """Preempt rows until `num_pages` are free."""
        budget = self._budget
        while budget.num_pages < num_pages and not budget.waits_for_pages:
            victim = next(self._next, None)
            if victim is None or not (victim.is_paused or victim.rank > row.rank):
                return
            if victim.num_in_flight:
                budget.excluded.add(victim)
                budget.waits_for_pages = True
            else:
                self.preempt(victim)
