"""What clients hold of a model's places and pages, and who of them gives way.

Owns the comparison alone: `token_draft` asks it for every draft, from the rows as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from triptych.schedulers.token_state import SequenceState


class Holdings:
    """What clients hold of the places and pages there are, as they would after some gave way."""

    def __init__(self, running: Iterable[SequenceState]) -> None:
        self._num_rows: Counter[str] = Counter()
        self._num_pages: Counter[str] = Counter()
        self._by_client: dict[str, list[SequenceState]] = {}
        for row in running:
            self._num_rows[row.client] += 1
            self._num_pages[row.client] += self.num_pages_of(row)
            self._by_client.setdefault(row.client, []).append(row)

    def num_pages_of(self, row: SequenceState) -> int:
        """Pages that a running row holds."""
        return len(row.lease) if row.lease is not None else 0

    def creditor(
        self, row: SequenceState, num_pages: int, *, needs_row: bool
    ) -> SequenceState | None:
        """Who gives way to `row`: the newest of a client that holds more than its own all the same.

        None gives way to one of lower priority.
        """
        for client, own in self._by_client.items():
            victim = own[-1] if own else None
            if client == row.client or victim is None or victim.rank[0] < row.rank[0]:
                continue
            has_more_rows = self._num_rows[client] >= self._num_rows[row.client] + 2
            rest = self._num_pages[client] - self.num_pages_of(victim)
            if has_more_rows if needs_row else rest >= self._num_pages[row.client] + num_pages:
                return victim
        return None

    def remove(self, row: SequenceState) -> None:
        """`row` gives way."""
        self._by_client[row.client].remove(row)
        self._num_rows[row.client] -= 1
        self._num_pages[row.client] -= self.num_pages_of(row)

    def add(self, row: SequenceState, num_pages: int) -> None:
        """`row` begins."""
        self._num_rows[row.client] += 1
        self._num_pages[row.client] += num_pages
