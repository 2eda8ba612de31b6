"""The slots and pages that each client of a model holds, and which rows are preempted by fairness.

Owns the comparison alone: `policy` makes it for every step, from the running rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.state import SequenceState


class ClientUsage:
    """Slots and pages by client, as they would be after some preemptions.

    `num_rows_left` slots and `num_pages_left` pages are free.
    """

    def __init__(
        self,
        running: Iterable[SequenceState],
        pool: PagePool,
        num_rows_left: int,
        num_pages_left: int,
    ) -> None:
        self._pool = pool
        self._num_rows_left = num_rows_left
        self._num_pages_left = num_pages_left
        self._num_rows: Counter[str] = Counter()
        self._num_pages: Counter[str] = Counter()
        self._by_client: dict[str, list[SequenceState]] = {}
        for row in running:
            self._count(row.client, 1, _num_pages_of(row))
            self._by_client.setdefault(row.client, []).append(row)

    @property
    def is_even(self) -> bool:
        """Whether no client holds two rows: none is then preempted for its slot."""
        return max(self._num_rows.values(), default=0) < 2

    def admit(self, row: SequenceState, num_pages: int) -> list[SequenceState] | None:
        """Start `row` with `num_pages`; returns the rows to preempt, `None` where it may not."""
        victims: list[SequenceState] = []
        while self._num_rows_left < 1 or self._num_pages_left < num_pages:
            victim = self._find_victim(row, num_pages)
            if victim is None:
                for victim in reversed(victims):
                    self._by_client[victim.client].append(victim)
                    self._free(victim, -1)
                return None
            self._by_client[victim.client].pop()
            self._free(victim, 1)
            victims.append(victim)
        self._num_rows_left -= 1
        self._num_pages_left -= num_pages
        self._count(row.client, 1, num_pages)
        return victims

    def _find_victim(self, row: SequenceState, num_pages: int) -> SequenceState | None:
        """The newest row of a client that still holds more than the client of `row` afterwards.

        No row is preempted for one of lower priority.
        """
        for client, own in self._by_client.items():
            victim = own[-1] if own else None
            if client == row.client or victim is None or victim.rank[0] < row.rank[0]:
                continue
            has_more_rows = self._num_rows[client] >= self._num_rows[row.client] + 2
            rest = self._num_pages[client] - _num_pages_of(victim)
            has_more_pages = rest >= self._num_pages[row.client] + num_pages
            if has_more_rows if self._num_rows_left < 1 else has_more_pages:
                return victim
        return None

    def _free(self, row: SequenceState, sign: int) -> None:
        """Count a row's slot and pages as free, or as held again (-1)."""
        self._num_rows_left += sign
        pages = row.lease.page_ids if row.lease is not None else ()
        num_alone = sum(self._pool.num_holders(page) == 1 for page in pages)
        self._num_pages_left += sign * num_alone  # other rows may hold the rest
        self._count(row.client, -sign, -sign * _num_pages_of(row))

    def _count(self, client: str, num_rows: int, num_pages: int) -> None:
        self._num_rows[client] += num_rows
        self._num_pages[client] += num_pages


def _num_pages_of(row: SequenceState) -> int:
    """The number of pages that a running row holds."""
    return len(row.lease) if row.lease is not None else 0
