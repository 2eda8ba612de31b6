"""The tiers of the prefix cache below the device: which pages are saved, and which come back.

Owns the order on the engine's loop. Pages are saved once they are indexed, a few at a time; a page
that is evicted before is lost to the tiers and computed again. The pages of a waiting row come back
once there is a slot for it: at its arrival, after a preemption, or after a wait in which pages that
it had found were evicted. Knows no files and no tensors: `core.kv.tiers` moves the pages.

All methods run on the loop's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triptych.core.kv.pages import Lease, PageJournal
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.tiers.store import PageTiers
from triptych.core.kv.transfer.memory import PageMemory
from triptych.core.kv.transfer.messages import PageFormat
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.tokens.page_fetches import (
    ExchangingScheduler,
    OpenFetch,
    PageFetches,
    PageSource,
)
from triptych.schedulers.tokens.state import SequenceState

if TYPE_CHECKING:
    from triptych.schedulers.tokens.scheduler import TokenScheduler

_MOST_SAVED_AT_ONCE = 8
"""Pages held for one copy; the pool may be small, and running rows need it."""
_POOL_SHARE = 8
_MOST_CHECKED = 4  # waiting rows whose missing pages are looked for at the end of a step


class PageStore(PageSource, Protocol):
    """The loop's view of `core.kv.tiers.store.PageTiers`."""

    counts: Counter[str]

    def gauges(self) -> dict[str, float]:
        """The bytes in each tier, by series name."""
        ...

    def num_held(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that can be fetched."""
        ...

    def save(self, pages: Sequence[tuple[bytes, int]], saved: Callable[[], None]) -> None:
        """Copy pages, `(key, page_id)`; they stay as they are until `saved` is called."""
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make the pages of a prompt those used last."""
        ...

    def pin(self, keys: Sequence[bytes], tenant: str) -> int:
        """Keep pages, also those that are still to be saved; returns how many of the first."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let pages give way to others again."""
        ...

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove pages; from now on they are not found."""
        ...

    def clear(self) -> None:
        """Remove all pages; from now on none is found."""
        ...


@dataclass(frozen=True, slots=True)
class TierSizes:
    """The bytes in host memory, and on disk in `folder` if that is not empty; 0: by free space."""

    host_bytes: int
    folder: str
    disk_bytes: int


def open_tiers(
    scheduler: TokenScheduler, memory: PageMemory, page_format: PageFormat, sizes: TierSizes
) -> Callable[[], None]:
    """Keep a model's pages in tiers below the device; returns the function that ends that.

    Raises `ConfigError` for a folder that cannot be used.
    """
    host, disk = HostTier(sizes.host_bytes, memory.page_bytes), None
    if sizes.folder:
        disk = DiskTier(Path(sizes.folder).expanduser(), page_format, sizes.disk_bytes)
    tiers = PageTiers(memory, host, disk)
    scheduler.exchange = StoredPages(scheduler, tiers)
    tiers.begin()
    return tiers.close


class StoredPages(PageFetches):
    """Saves the pages of one model to `store`, and fetches them from there."""

    def __init__(self, scheduler: ExchangingScheduler, store: PageStore) -> None:
        super().__init__(scheduler, store)
        pool = scheduler.tokens.pool
        self._store = store
        self._pool = pool
        self._journal = pool.journal = PageJournal()
        self._most_saved = max(1, min(_MOST_SAVED_AT_ONCE, pool.num_pages // _POOL_SHARE))
        self._unsaved: dict[bytes, None] = {}
        self._is_saving = False
        self._wanting: dict[SequenceState, int] = {}  # with the step of its last fetch
        self._num_steps = 0
        self._num_unsaved = 0

    def on_submit(self, row: SequenceState) -> None:
        """Fetch the pages of a prompt that are in a lower tier."""
        self._wanting[row] = -1
        self._fetch(row)

    def on_preempt(self, row: SequenceState) -> None:
        """Fetch the pages of a row again if they are evicted until it starts."""
        self._wanting[row] = -1

    def on_end(self, row: SequenceState) -> None:
        """End the fetch of a row, and keep its pages longest."""
        super().on_end(row)
        self._wanting.pop(row, None)
        self._store.touch(row.keys)

    def on_step_end(self) -> None:
        """Save the pages that the step completed, and fetch those that there is room for now."""
        self._num_steps += 1
        self._read_journal()
        self._save()
        self._fetch_first()

    def num_kept(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that are in a lower tier."""
        return self._store.num_held(keys)

    def pin(self, keys: Sequence[bytes], tenant: str) -> int:
        """Keep pages in the lower tiers; returns how many of the first ones are kept."""
        return self._store.pin(keys, tenant)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Let pages give way to others again."""
        self._store.unpin(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove pages from the lower tiers."""
        for key in keys:
            self._unsaved.pop(key, None)
        self._store.drop(keys)

    def clear(self) -> None:
        """Empty the lower tiers."""
        self._unsaved.clear()
        self._store.clear()

    def add_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """`stats` with the counts of the tiers."""
        counters = {**stats.counters, **self._store.counts}
        counters["kv_pages_unsaved_total"] = self._num_unsaved
        return replace(
            stats, gauges={**stats.gauges, **self._store.gauges()}, counters=dict(counters)
        )

    def _fetch_first(self) -> None:
        """Fetch the pages of the rows that begin next, as far as there are slots for them."""
        state = self._state
        if not self._has_slot:
            return
        for row in islice(state.shares.in_turn(state.waiting), _MOST_CHECKED):
            if row in self._wanting:
                self._fetch(row)

    def _fetch(self, row: SequenceState) -> None:
        """Fetch the pages that a waiting row lacks and that a tier has, once in a step.

        Otherwise two rows might evict each other's pages without end.
        """
        if self._has_slot and row not in self._open and self._wanting[row] < self._num_steps:
            missing = self._missing(row)
            room = min(self._pool.num_available, self._most_pages()) - len(missing.found)
            num_pages = min(room, self._store.num_held(missing.keys))
            if num_pages > 0 and self._start(row, missing, num_pages, row.request):
                self._wanting[row] = self._num_steps

    @property
    def _has_slot(self) -> bool:
        """Whether a waiting row can begin."""
        return len(self._state.running) < self._state.max_rows

    def _most_pages(self) -> int:
        """All pages, if no row runs that may need another one."""
        return super()._most_pages() if self._state.running else self._pool.num_pages

    def _read_journal(self) -> None:
        journal = self._journal
        self._unsaved.update(dict.fromkeys(journal.indexed))
        journal.indexed.clear()
        if journal.distrusted:
            self.drop(journal.distrusted)
            journal.distrusted.clear()

    def _save(self) -> None:
        """Save the next pages, unless others are being saved."""
        if self._is_saving or not self._unsaved:
            return
        lease, pages = self._pool.acquire(), list[tuple[bytes, int]]()
        while self._unsaved and len(pages) < self._most_saved:
            key = next(iter(self._unsaved))
            del self._unsaved[key]
            self._pool.extend_cached(lease, (key,))
            if len(lease) > len(pages):
                pages.append((key, lease.page_ids[-1]))
            else:
                self._num_unsaved += 1
        if not pages:
            self._pool.release(lease)
            return
        self._is_saving = True
        self._state.in_transfer.add(lease)
        self._store.save(pages, lambda: self._post(partial(self._saved, lease)))

    def _saved(self, lease: Lease) -> None:
        self._is_saving = False
        self._state.in_transfer.remove(lease)
        self._pool.release(lease)
        self._note_change()
        self._save()

    def _take(self, awaited: OpenFetch, num_arrived: int) -> None:
        num_indexed = len(self._journal.indexed)
        super()._take(awaited, num_arrived)
        del self._journal.indexed[num_indexed:]  # they came from a tier

    def _end(self, awaited: OpenFetch) -> None:
        super()._end(awaited)
        if awaited.num_published < len(awaited.keys):
            self._wanting.pop(awaited.row, None)  # it computes the rest
        self._fetch_first()
