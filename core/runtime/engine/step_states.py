"""The states of a step's rows: what is done to them before the model runs, on the way, and after.

Owns the reading of `TokenRow`'s snapshots. Knows no layers: `core.runtime.layers.states` stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from triptych.core.engine_api.plan import TokenRow
from triptych.core.runtime.layers.states import RowStates, StateBatch, StateCut


class StepStates:
    """Steps over `states`. Padding rows have the line after those of the batch slots."""

    def __init__(self, states: RowStates, max_batch_size: int) -> None:
        self._states = states
        self._padding_line = max_batch_size

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

    def batch(self, rows: Sequence[TokenRow], slots_B: torch.Tensor) -> StateBatch:
        """The states of a step of these rows; `slots_B` are their lines on the device."""
        cuts = [
            StateCut(number, position - row.start, line)
            for number, row in enumerate(rows)
            for position, line in self._saved(row)
            if position < row.start + row.num_tokens
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
        """Copy the states that rows end with to their snapshots."""
        self._states.copy(
            [
                (row.slot, line)
                for row in rows
                for position, line in self._saved(row)
                if position == row.start + row.num_tokens
            ]
        )

    def _saved(self, row: TokenRow) -> Iterator[tuple[int, int]]:
        """The positions where a row's state is saved, and to which line."""
        for position, snapshot in row.saved_snapshots:
            yield position, self._states.snapshot_line(snapshot)
