"""How many pages and states a cache has.

Owns the division of its memory between pages, snapshots of states, and pages of layers with a
window. Knows no ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triptych.core.kv.parts import PartKind
from triptych.core.kv.windows import WindowSize
from triptych.core.options.config import ScheduleOptions
from triptych.core.runtime.layers.attention import KvLayout

_SNAPSHOT_TOKENS = 256
"""Tokens of cached pages for each snapshot: a prompt has one, and so has each of its beginnings."""
_SNAPSHOTS_PER_ROW = 3
"""Of its prompt, and of its progress, while a third is written."""
_SNAPSHOT_SHARE = 0.5
"""The largest share of the memory for snapshots."""
_USUAL_WINDOWS = 4
"""Windows in a usual row. Where memory is short, there are pages of both kinds for as many of these
as fit: with more, short rows would leave the other pages unused, with fewer, long ones these."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The most rows at a time, and the most tokens of a step."""

    num_rows: int
    step_tokens: int

    @classmethod
    def of(cls, schedule: ScheduleOptions, max_length: int) -> Demand:
        """The demand that the options allow."""
        most = schedule.max_batch_input_tokens
        step_tokens = most if schedule.enable_chunked_prefill else max(most, max_length)
        return cls(min(schedule.max_batch_size, max(1, most // 2)), step_tokens)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Pages, and states for rows in batch slots and for snapshots.

    `windows` is given where layers with a window have pages of their own. `num_kept` are the states
    that rows with drafts keep in addition (`core.runtime.engine.step_states`).
    """

    num_pages: int
    num_slots: int = 0
    num_snapshots: int = 0
    windows: WindowSize | None = None
    num_kept: int = 0

    @property
    def num_window_pages(self) -> int:
        """The pages of layers with a window; 0 if they have none of their own."""
        return 0 if self.windows is None else self.windows.num_pages

    def with_padding(self) -> CacheSize:
        """The size with a page of each kind and a state for padding rows."""
        windows = self.windows
        if windows is not None:
            windows = replace(windows, num_pages=windows.num_pages + 1)
        num_pages, num_slots = self.num_pages + 1, self.num_slots + 1
        return replace(self, num_pages=num_pages, num_slots=num_slots, windows=windows)

    def layout_of(self, layout: KvLayout) -> KvLayout:
        """`layout` with pages of these kinds."""
        return replace(layout, num_window_pages=self.num_window_pages)

    def page_bytes(self, layout: KvLayout, num_more: int = 0) -> int:
        """The bytes of all pages, and of `num_more` of each kind."""
        full, window = self.num_pages + num_more, self.num_window_pages + num_more
        return full * layout.page_bytes + window * layout.window_bytes

    def part_bytes(self, layout: KvLayout) -> dict[PartKind, int]:
        """The bytes of all parts of each kind that can be found."""
        numbers = {
            PartKind.FULL: self.num_pages,
            PartKind.WINDOW: self.num_window_pages,
            PartKind.STATE: self.num_snapshots,
        }
        sizes = self.layout_of(layout).part_bytes
        return {kind: numbers[kind] * size for kind, size in sizes.items() if numbers[kind]}

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

    def with_windows(
        self, layout: KvLayout, num_bytes: int, *, least_pages: int, most_pages: int, demand: Demand
    ) -> CacheSize:
        """As many pages of two kinds within `num_bytes`, or `self` where these are no more.

        That is so where windows are about as long as rows.
        """
        window, size = layout.longest_window, layout.page_size
        one = WindowSize.least(window, size, num_rows=1, step_tokens=demand.step_tokens)
        row_pages = one.reach + 2
        if not window or row_pages >= least_pages:
            return self
        own = replace(layout, num_window_pages=1)  # for the bytes of each kind
        left_bytes = num_bytes - self.num_snapshots * layout.state_bytes
        rows_bytes = left_bytes - (one.num_pages - row_pages) * own.window_bytes
        row_bytes = row_pages * own.window_bytes
        usual_bytes = min(least_pages, _USUAL_WINDOWS * row_pages) * own.page_bytes + row_bytes
        num_fitting = (rows_bytes - least_pages * own.page_bytes) // row_bytes
        num_rows = min(demand.num_rows, num_fitting, rows_bytes // usual_bytes)
        if num_rows < 1:
            return self
        windows = WindowSize.least(window, size, num_rows=num_rows, step_tokens=demand.step_tokens)
        left_bytes -= windows.num_pages * own.window_bytes
        num_pages = min(most_pages, left_bytes // max(1, own.page_bytes))
        if not windows.num_pages < self.num_pages <= num_pages:
            return self
        if num_pages == most_pages:  # more of these are of no use: the rest is for later hits
            left_bytes -= num_pages * own.page_bytes
            num_spare = min(num_rows * row_pages, left_bytes // own.window_bytes)
            most_windows = max(windows.num_pages, num_pages // 2)
            num_windows = min(windows.num_pages + num_spare, most_windows)
            windows = replace(windows, num_pages=num_windows)
        return replace(self, num_pages=num_pages, windows=windows)
