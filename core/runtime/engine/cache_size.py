"""How many pages and states a cache has.

Owns the division of its memory between pages and snapshots of states. Knows no ledger.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.runtime.layers.attention import KvLayout

_SNAPSHOT_TOKENS = 256
"""Tokens of cached pages for each snapshot: a prompt has one, and so has each of its beginnings."""
_SNAPSHOTS_PER_ROW = 3
"""Of its prompt, and of its progress, while a third is written."""
_SNAPSHOT_SHARE = 0.5
"""The largest share of the memory for snapshots."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Pages, and states for rows in batch slots and for snapshots."""

    num_pages: int
    num_slots: int = 0
    num_snapshots: int = 0

    @classmethod
    def divided(
        cls,
        layout: KvLayout,
        num_bytes: int,
        *,
        least_pages: int,
        most_pages: int,
        num_slots: int,
        has_snapshots: bool,
    ) -> CacheSize:
        """The most that is of use within `num_bytes`, which hold `least_pages` without states.

        More pages than `most_pages` are of no use. `num_slots` have their memory already.
        """
        page_bytes, state_bytes = max(1, layout.page_bytes), layout.state_bytes
        num_snapshots = 0
        if state_bytes and has_snapshots:
            tokens_bytes = layout.page_bytes * _SNAPSHOT_TOKENS // layout.page_size
            most = most_pages * layout.page_size // _SNAPSHOT_TOKENS
            even = min(num_bytes // (tokens_bytes + state_bytes), most)
            wanted = max(even, _SNAPSHOTS_PER_ROW * num_slots)
            left_bytes = min(_SNAPSHOT_SHARE * num_bytes, num_bytes - least_pages * page_bytes)
            num_snapshots = max(0, min(wanted, int(left_bytes // state_bytes)))
        left = (num_bytes - num_snapshots * state_bytes) // page_bytes
        return cls(max(least_pages, min(left, most_pages)), num_slots, num_snapshots)
