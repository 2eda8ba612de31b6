"""The running rows, as a step is being chosen: which of them are answered in it, and how far.

Owns rule 2 of `policy`: tokens, forced tokens and drafts of rows that are being answered. Changes
nothing but the step's budget.
"""

from __future__ import annotations

from triptych.schedulers.shares import round_robin
from triptych.schedulers.tokens.budget import StepBudget
from triptych.schedulers.tokens.preemption import Preemption
from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState, TokenState
from triptych.schedulers.tokens.step import TokenLimits


class Decodes:
    """The rows that are being answered; `begun` are those whose prompts are computed."""

    def __init__(
        self, state: TokenState, limits: TokenLimits, budget: StepBudget, preemption: Preemption
    ) -> None:
        self.begun: list[SequenceState] = []
        self._answering: list[SequenceState] = []
        self._pool, self._limits, self._budget = state.pool, limits, budget
        self._preemption = preemption
        self._has_limit = state.options.max_batch_total_tokens > 0
        self._has_held_back = bool(limits.names or limits.clients)
        self._waits_for_masks = self._waits_for_tokens = False
        for row in state.running:
            # Most rows decode: only the others need the property.
            (self._answering if row.is_decoding or row.is_answering else self.begun).append(row)
            if row.grammar is not None and row.is_awaited:
                self._waits_for_masks = True
            if row.is_drafting and not row.is_paused:
                self._waits_for_tokens = True

    def can_step(self, row: SequenceState) -> bool:
        """Whether a running row may take part."""
        is_held = self._has_held_back and self._limits.excludes(row)
        return row.can_step and not (is_held or row in self._budget.excluded)

    def choose(self) -> list[ScheduledRow]:
        """A token, or the forced tokens and drafts, of every row, as far as pages go.

        Rows that decode come first.
        """
        budget, rows = self._budget, self._taking_part()
        num_spare = max(0, budget.num_tokens - len(rows))
        decodes, others = list[ScheduledRow](), list[ScheduledRow]()
        for row in rows:
            piece = self._piece(row, num_spare, len(rows)) if self._can_decode(row) else None
            if piece is None or not self._take(piece):
                continue
            (decodes if piece.is_decode else others).append(piece)
            num_spare -= piece.num_tokens - 1
            budget.num_tokens -= piece.num_tokens
            if self._has_limit:
                budget.context_tokens += budget.rounded_context(row)
        return decodes + others

    def _taking_part(self) -> list[SequenceState]:
        """The rows that decode in this step: where not all may, those that waited longest."""
        answering = self._answering
        most = self._limits.max_answering
        if len(answering) <= most:
            return answering
        able = [row for row in answering if self._can_decode(row)]
        able.sort(key=lambda row: (row.rank[0], row.num_in_flight, row.last_token_s))
        chosen = set(round_robin(able, most))
        return [row for row in answering if row in chosen]

    def _can_decode(self, row: SequenceState) -> bool:
        """Whether `row`, which is being answered, may take part."""
        if self._waits_for_masks and row.grammar is not None:
            return False
        if self._waits_for_tokens and row.num_unknown:
            return False
        return self.can_step(row)

    def _piece(self, row: SequenceState, num_spare: int, num_rows: int) -> ScheduledRow:
        """A row's part of a step with room for `num_spare` tokens in addition to one per row."""
        num_tokens, is_sampled, drafts = 1, True, row.drafts
        if row.is_decoding and not drafts:  # as most do
            return ScheduledRow(row, row.num_booked, num_tokens, is_sampled)
        if not row.is_decoding:
            num_tokens = min(row.num_remaining, 1 + num_spare)
            is_sampled = num_tokens == row.num_remaining
        if drafts:  # beyond the page of its token only where others lack none
            page_size = self._pool.page_size
            num_free = self._num_held(row) or page_size
            num_free += page_size * max(0, self._budget.num_pages - num_rows)
            num_left = min(num_spare + 1, num_free) - num_tokens if is_sampled else 0
            drafts = drafts[: max(0, num_left)]
        return ScheduledRow(row, row.num_booked, num_tokens + len(drafts), is_sampled, drafts)

    def _num_held(self, row: SequenceState) -> int:
        """The next positions for which a row has pages."""
        assert row.lease is not None, "a running row holds a lease"
        return len(row.lease.page_ids) * self._pool.page_size - row.num_booked

    def _take(self, piece: ScheduledRow) -> bool:
        """Take the pages of a row's part; false if it has to wait."""
        row, num_tokens, budget, num_windows = piece.unit, piece.num_tokens, self._budget, 0
        if self._pool.windows is not None:
            num_windows = budget.num_windows_for(row, piece.start, num_tokens)
            if num_windows > budget.num_windows:
                return False  # until chunks in flight end
        if num_tokens > self._num_held(row) and not self._preemption.find_pages(row, num_tokens):
            return False
        budget.num_windows -= num_windows
        return True
