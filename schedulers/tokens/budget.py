"""The rows, tokens and pages that a step may still take, as it is being chosen.

Owns the counts and what follows from the choices so far: which pages preempted rows free, which
pages admitted rows share or compute. Decides nothing; books nothing.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable

from triptych.schedulers.tokens.state import SequenceState, TokenState


class StepBudget:
    """The rows, tokens and pages left for one step.

    A step that `is_short` lacked a page for a running row. `waits_for_pages` while rows that have
    ended or sit out will free pages when their steps in flight are over. `excluded` rows run, but
    take no part in the step.

    Pages of window layers are taken by steps, not by rows that start: there are enough for the
    windows of all rows, and chunks of prompts take what is left. Those in flight may have taken it:
    a row without room then sits out until they end.
    """

    __slots__ = (
        "_freed",
        "_pool",
        "_shared",
        "_watermark_pages",
        "_windows",
        "computed_keys",
        "context_tokens",
        "excluded",
        "is_short",
        "num_pages",
        "num_rows",
        "num_tokens",
        "num_windows",
        "waits_for_pages",
    )

    def __init__(self, state: TokenState) -> None:
        pool, options = state.pool, state.options
        self._pool = pool
        self._watermark_pages = math.ceil(options.kvcache_ce_watermark * pool.num_pages) - 1
        self.num_rows = min(len(state.free_slots), state.max_rows - len(state.running))
        self.num_tokens = options.max_batch_input_tokens
        self.num_pages = pool.num_available
        self._windows = pool.windows
        self.num_windows = 0 if pool.windows is None else pool.windows.num_available
        self.context_tokens = 0
        self.is_short = False
        self.waits_for_pages = bool(state.leaving)
        self.excluded: set[SequenceState] = set()
        self.computed_keys: set[bytes] = set()
        """Keys of the pages that admitted rows will compute."""
        self._freed: Counter[int] = Counter()
        self._shared: set[int] = set()

    @property
    def num_prompt_pages(self) -> int:
        """Pages that prompts may take while rows are active: use stays below the watermark."""
        return self.num_pages - (self._pool.num_pages - self._watermark_pages)

    def rounded_context(self, row: SequenceState) -> int:
        """The row's context in tokens, rounded up to whole pages."""
        return self._pool.num_pages_for(row.num_tokens) * self._pool.page_size

    def num_missing(self, num_pages: int, found: Iterable[int]) -> int:
        """Free pages that a row of `num_pages` takes, given the cached pages it `found`."""
        return num_pages - sum(map(self._is_held, found))

    def window_room(self, row: SequenceState, start: int) -> int:
        """The most tokens that `row` can compute from `start` on with its pages of window layers.

        That is more than any prompt has where these have no pages of their own.
        """
        if self._windows is None:
            return sys.maxsize
        num_held = start // self._pool.page_size if row.lease is None else len(row.lease.window_ids)
        num_pages = num_held + self.num_windows - self.num_windows_for(row, start, 0)
        return max(0, num_pages * self._pool.page_size - start)

    def num_windows_for(self, row: SequenceState, start: int, num_tokens: int) -> int:
        """The pages of window layers that `row` takes for tokens from `start` on.

        A row that is to start takes those that its first token sees, as no row may hold them now.
        """
        if self._windows is None:
            return 0
        last = self._pool.num_pages_for(start + num_tokens)
        if row.lease is not None:
            return max(0, last - len(row.lease.window_ids))
        return last - max(0, start // self._pool.page_size - self._windows.reach)

    def preempt(self, row: SequenceState) -> None:
        """Count the row's slot and pages as free."""
        assert row.lease is not None, "a running row holds a lease"
        self.excluded.add(row)
        self._freed.update(row.lease.page_ids)
        self.num_rows += 1
        self.num_pages += sum(not self._is_held(page) for page in row.lease.page_ids)

    def admit(self, row: SequenceState, found: list[int], num_missing: int) -> None:
        """Count the slot and pages of a row that starts."""
        self.num_pages -= num_missing
        self.num_rows -= 1
        self._shared.update(found)
        self.computed_keys.update(row.keys[len(found) :])

    def _is_held(self, page_id: int) -> bool:
        """Whether some row holds a page after the choices so far."""
        return page_id in self._shared or self._pool.num_holders(page_id) > self._freed[page_id]
