"""A sequence's part of a step: what it computes, and what booking it changes.

Owns the fields of its plan (`core.engine_api.plan.TokenRow`). Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec import structs

from triptych.core.engine_api.plan import TokenRow
from triptych.core.kv.pages import PagePool
from triptych.schedulers.tokens.state import SequenceState


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """A sequence's part of a step in flight; a stale one, after a failed step, is void.

    The last of its `num_tokens` are `drafts`, which the step verifies.
    """

    unit: SequenceState
    start: int
    num_tokens: int
    is_sampled: bool
    drafts: tuple[int, ...] = ()
    is_stale: bool = False
    stage: str = "decode"
    """The name of its part of the step, known once booked."""
    saves: tuple[tuple[int, int], ...] = ()
    """The snapshots of its state that the step saves, `(position, snapshot)`."""
    restored: int = -1
    """The snapshot that the step begins with, which it holds; -1 without one."""

    @property
    def is_decode(self) -> bool:
        """Whether its only input is the token sampled last, which is on the device."""
        return self.unit.is_decoding and not self.drafts

    @property
    def known_end(self) -> int:
        """The end of its positions whose tokens are certain."""
        return self.start + self.num_tokens - len(self.drafts)

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """How many of its drafts the step has sampled itself, before another token."""
        if not self.drafts:
            return 0
        pairs = zip(self.drafts, token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def book(self, pool: PagePool) -> TokenRow:
        """Book the row, with pages of window layers from `pool`; returns its part of the plan."""
        row, lease = self.unit, self.unit.lease
        assert lease is not None, "a running row holds a lease"
        end, num_pages = self.known_end, len(lease.page_ids)
        has_windows = False
        if pool.windows is not None:
            pool.extend_windows(lease, pool.num_pages_for(self.start + self.num_tokens))
            has_windows = len(lease.window_ids) > row.num_bound_windows
        if not (row.is_decoding or row.is_answering):
            self.stage = "prefill"
        has_new = num_pages > row.num_bound_pages
        planned = TokenRow(
            job_id=row.name,
            slot=row.slot,
            start=self.start,
            num_tokens=self.num_tokens,
            token_ids=() if self.is_decode else (*row.token_ids(self.start, end), *self.drafts),
            new_page_ids=tuple(lease.page_ids[row.num_bound_pages :]) if has_new else (),
            new_window_ids=lease.windows_from(row.num_bound_windows) if has_windows else (),
            first_window=lease.first_window,
            is_sampled=self.is_sampled,
            num_drafts=len(self.drafts),
            allowed=row.allowed if self.is_sampled and row.has_masks else b"",
            draft_masks=row.draft_masks(len(self.drafts)) if row.has_masks else (),
            num_relaxed=row.reasoning.num_relaxed(self.drafts) if row.reasoning else 0,
            saved_snapshots=self.saves,
        )
        if not row.is_bound:
            self.restored, lease.snapshot = lease.snapshot, -1
            planned = structs.replace(planned, restored_snapshot=self.restored, **row.binding())
        if self.is_sampled:
            row.num_forced = 0
            if row.grammar is not None:
                row.grammar.is_ready = False  # until the sampled token is known
        row.num_bound_pages, row.num_bound_windows = num_pages, len(lease.window_ids)
        row.num_booked = end
        row.num_unknown += self.is_sampled
        row.is_bound = True
        row.is_decoding = self.is_sampled
        row.drafts, row.is_verifying = (), bool(self.drafts)
        return planned

    def roll_back(self) -> None:
        """Undo the booking; the row is bound again at its next booking."""
        row = self.unit
        row.num_booked = self.start
        row.num_unknown -= self.is_sampled
        row.is_bound = row.is_decoding = row.is_verifying = False
        row.num_bound_pages = row.num_bound_windows = row.num_forced = 0
        if row.grammar is not None:
            row.grammar.is_ready = True
