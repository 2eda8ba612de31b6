"""Pages that a waiting prompt can wait for: those that are on their way into the cache.

Owns what is coming, and the choice of the page to wait for. Reads the scheduler's state and changes
nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from triptych.schedulers.tokens.budget import StepBudget
from triptych.schedulers.tokens.state import SequenceState, TokenState


class ComingPages:
    """Pages that running rows compute, that other engines send, or that `budget` admits rows for.

    Rows with `names` are held back, and compute nothing.
    """

    def __init__(self, state: TokenState, budget: StepBudget, names: Collection[str]) -> None:
        self._state = state
        self._budget = budget
        self._names = names

    def has(self, key: bytes) -> bool:
        """Whether the page of `key` is fetched, or computed by a row that is not held back."""
        owner = self._state.computing.get(key)
        is_moving = owner is not None and not (owner.is_paused or owner.name in self._names)
        return key in self._budget.computed_keys or key in self._state.arriving or is_moving

    def find_awaited(self, row: SequenceState, num_found: int) -> int:
        """The number of leading pages of `row` to wait for; 0 if it lacks none that is coming.

        Where a page is coming, the pages before it are too: its row computes them first.
        """
        keys = row.lookup_keys(self._state.pool.page_size)
        if self._state.pool.snapshots is not None:
            return self._find_with_state(keys, num_found)
        num_coming = bisect_left(keys[num_found:], True, key=lambda key: not self.has(key))
        return num_found + num_coming if num_coming else 0

    def _find_with_state(self, keys: list[bytes], num_found: int) -> int:
        """As `find_awaited`, up to a page after which the row that computes it saves its state."""
        num_pages = self._state.pool.num_indexed(keys)
        while num_pages < len(keys) and self.has(keys[num_pages]):
            num_pages += 1
        for last in range(num_pages, num_found, -1):
            if not self.has(keys[last - 1]):
                return 0
            owner = self._state.computing.get(keys[last - 1])
            if owner is None or owner.will_save(last, self._state.pool.page_size):
                return last
        return 0
