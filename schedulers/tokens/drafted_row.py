"""The record of one row at the model that drafts.

Owns the data alone: `draft_model` changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.kv.pages import Lease
from triptych.schedulers.tokens.draft_pace import DraftPace


@dataclass(slots=True, eq=False)
class DraftedRow:
    """A row as the drafting model knows it.

    It awaits `num_wanted` drafts, or will once its tokens in flight are known (`is_due`). While it
    holds a `lease` on pages of that model, the first `num_computed` positions there hold the row's
    tokens, and those after them its `guesses`; a row that `is_bound` has its slot at that model's
    runner, with `num_bound_pages` of the pages.
    """

    pace: DraftPace
    num_wanted: int = 0
    is_due: bool = False
    lease: Lease | None = None
    num_computed: int = 0
    guesses: tuple[int, ...] = ()
    is_bound: bool = False
    num_bound_pages: int = 0
    is_unpaid: bool = False
    """Whether it has drafts that were neither verified nor paid."""
