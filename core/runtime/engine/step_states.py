"""The states of a step's rows: what is done to them before the model runs, on the way, and after.

Owns the reading of `TokenRow`'s snapshots, and the states that rows with drafts go back to. Knows
no layers: `core.runtime.layers.states` stores.

A state cannot forget a token. So a row with drafts keeps the one before them in a line of its own.
Where a draft was wrong, the row's next step starts there again, and computes the accepted tokens
once more before new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.runtime.layers.states import RowStates, StateBatch, StateCut


class StepStates:
    """Steps over `states`. Padding rows have the line after those of the batch slots.

    The last lines before the snapshots hold the states that rows with drafts keep, if there may be
    any such rows.
    """

    def __init__(self, states: RowStates, max_batch_size: int) -> None:
        self._states = states
        self._padding_line = max_batch_size
        self._first_kept = states.num_slots - max_batch_size
        self._ends = np.full(max_batch_size, -1)
        self._kept = np.full(max_batch_size, -1)

    def begin(self, rows: Sequence[TokenRow]) -> None:
        """Bring the state that each starting row goes on from into its slot."""
        states = self._states
        states.clear([row.slot for row in rows if row.start == 0])
        states.copy(
            [
                (states.snapshot_line(row.restored_snapshot), row.slot)
                for row in rows
                if row.restored_snapshot >= 0
            ]
        )
        states.copy([(self._kept_line(row), row.slot) for row in rows if self._goes_back(row)])
        for row in rows:
            self._ends[row.slot] = row.start + row.num_tokens
            self._kept[row.slot] = _certain_end(row)

    def _goes_back(self, row: TokenRow) -> bool:
        """Whether a row starts again before its last drafts."""
        is_new = row.start == 0 or row.restored_snapshot >= 0
        if is_new or row.start == self._ends[row.slot]:
            return False
        assert row.start == self._kept[row.slot], "a row starts where its state is known"
        return True

    def _kept_line(self, row: TokenRow) -> int:
        """The line of the state before a row's drafts."""
        assert self._first_kept >= self._padding_line, "there are lines for rows with drafts"
        return self._first_kept + row.slot

    def batch(self, rows: Sequence[TokenRow], slots_B: torch.Tensor) -> StateBatch:
        """The states of a step of these rows; `slots_B` are their lines on the device."""
        cuts = [
            StateCut(number, position - row.start, line)
            for number, row in enumerate(rows)
            for position, line in self._on_the_way(row)
        ]
        # On a CPU a captured step is called again, with other rows in the same memory.
        lines = slots_B.tolist() if slots_B.is_cpu else self.lines(rows)
        return StateBatch(slots_B, lines, cuts)

    def lines(self, rows: Sequence[TokenRow]) -> list[int]:
        """The line of each row."""
        return [row.slot if row.slot >= 0 else self._padding_line for row in rows]

    def views(self, rows: Sequence[TokenRow]) -> list[torch.Tensor]:
        """The states of rows, as bytes: what a step changes that is run once more."""
        return [self._states.line(row.slot) for row in rows]

    def end(self, rows: Sequence[TokenRow]) -> None:
        """Copy the states that rows have after their last certain token to their snapshots."""
        self._states.copy(
            [
                (self._kept_line(row) if row.num_drafts else row.slot, line)
                for row in rows
                for position, line in self._saved(row)
                if position == _certain_end(row)
            ]
        )

    def _on_the_way(self, row: TokenRow) -> Iterator[tuple[int, int]]:
        """The positions within a row's tokens after which its state is copied, and the lines."""
        end = _certain_end(row)
        yield from (each for each in self._saved(row) if each[0] < end)
        if row.num_drafts:
            yield end, self._kept_line(row)

    def _saved(self, row: TokenRow) -> Iterator[tuple[int, int]]:
        """The positions where a row's state is saved, and to which line."""
        for position, snapshot in row.saved_snapshots:
            yield position, self._states.snapshot_line(snapshot)


def _certain_end(row: TokenRow) -> int:
    """The end of the row's tokens that are no drafts."""
    return row.start + row.num_tokens - row.num_drafts
