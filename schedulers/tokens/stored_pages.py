"""The tiers of the prefix cache below the device: which pages are saved, and which come back.

Owns the order on the engine's loop. What layers that see all tokens keep of a page is saved once it
is indexed; windows and states where a later row may go on: at the end of a prompt and of an answer,
and where a row has gone on or parted from cached pages. A few parts are saved at a time; one that
is evicted before is lost to the tiers and computed again. The pages of a waiting row come back once
there is a slot for it: at its arrival, after a preemption, or after a wait in which pages that it
had found were evicted. Knows no files and no tensors: `core.kv.tiers` moves the parts.

All methods run on the loop's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from triptych.core.kv.pages import HeldPart, PageJournal
from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.tiers.store import PageTiers, Shelf
from triptych.core.kv.transfer.memory import PartMemories
from triptych.core.kv.transfer.messages import PageFormat
from triptych.schedulers.base import SchedulerStats
from triptych.schedulers.tokens.page_fetches import (
    ExchangingScheduler,
    MissingPages,
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
        """The number of leading pages with a part in a tier."""
        ...

    def holds(self, kind: PartKind, key: bytes) -> bool:
        """Whether a part can be fetched."""
        ...

    def save(self, parts: Sequence[PagePart], saved: Callable[[], None]) -> None:
        """Copy parts; they stay as they are until `saved` is called."""
        ...

    def touch(self, parts: Iterable[tuple[PartKind, bytes]]) -> None:
        """Make the parts of a prompt those used last."""
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
    """The bytes in host memory by kind of parts, and on disk in `folder` if that is not empty.

    With 0 `disk_bytes` the free space decides. On disk, kinds have the shares of host memory.
    """

    host: Mapping[PartKind, int]
    folder: str
    disk_bytes: int


def open_tiers(
    scheduler: TokenScheduler, memories: PartMemories, page_format: PageFormat, sizes: TierSizes
) -> Callable[[], None]:
    """Keep a model's pages in tiers below the device; returns the function that ends that.

    Raises `ConfigError` for a folder that cannot be used.
    """
    shelves: dict[PartKind, Shelf] = {}
    with ExitStack() as on_error:
        for kind, num_bytes in sizes.host.items():
            memory, share = memories[kind], num_bytes / sum(sizes.host.values())
            disk = None
            if sizes.folder:
                own = page_format.of_kind(kind, memory.page_bytes)
                folder = Path(sizes.folder).expanduser()
                disk = DiskTier(folder, own, sizes.disk_bytes, share)
            shelves[kind] = Shelf(memory, HostTier(num_bytes, memory.page_bytes), disk)
            on_error.callback(shelves[kind].close)
        on_error.pop_all()
    tiers = PageTiers(shelves)
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
        self._unsaved: dict[tuple[PartKind, bytes], None] = {}
        self._is_saving = False
        self._wanting: dict[SequenceState, int] = {}  # with the step of its last fetch
        self._num_steps = 0
        self._num_unsaved = 0

    def on_submit(self, row: SequenceState) -> None:
        """Fetch the pages of a prompt that are in a lower tier."""
        self._wanting[row] = -1
        self._fetch(row)

    def on_answer(self, row: SequenceState) -> None:
        """Save what later rows need that go on where a prompt ends, or where the row did."""
        for num_pages in row.saved_pages:
            self._save_end(row, num_pages)

    def on_preempt(self, row: SequenceState) -> None:
        """Fetch the pages of a row again if they are evicted until it starts."""
        self._wanting[row] = -1
        self._save_progress(row)

    def on_end(self, row: SequenceState) -> None:
        """End the fetch of a row, and keep its pages longest."""
        super().on_end(row)
        self._wanting.pop(row, None)
        self._save_progress(row)
        rule, keys = self._pool.rule, row.keys
        self._store.touch((kind, keys[page]) for kind, page in rule.needed(len(keys)))

    def _save_progress(self, row: SequenceState) -> None:
        """Save what a row needs that goes on where this one is."""
        if row.lease is not None:
            self._save_end(row, row.lease.num_published)

    def _save_end(self, row: SequenceState, num_pages: int) -> None:
        """Save the windows and the state that a row needs to go on after so many pages."""
        for kind, page in self._pool.rule.ends(num_pages):
            self._unsaved[kind, row.keys[page]] = None

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
            for kind in PartKind:
                self._unsaved.pop((kind, key), None)
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
            missing = self._missing(row, self._num_reachable(row))
            if missing.keys and self._holds_all(missing) and self._start(row, missing, row.request):
                self._wanting[row] = self._num_steps

    def _num_reachable(self, row: SequenceState) -> int:
        """After how many pages a row can go on with parts of the tiers, as far as there is room."""
        pool, store, rule = self._pool, self._store, self._pool.rule
        keys = row.lookup_keys(pool.page_size)
        num_pages = pool.num_indexed(keys)
        if not rule.is_divided:
            num_pages += sum(1 for _ in takewhile(self._state.is_coming, keys[num_pages:]))
        if rule.has_full:
            held = takewhile(lambda key: store.holds(PartKind.FULL, key), keys[num_pages:])
            num_pages += sum(1 for _ in held)
        else:
            num_pages = len(keys)
        num_pages = min(num_pages, pool.num_available, self._most_pages())

        def has(kind: PartKind, page: int) -> bool:
            is_window = kind is PartKind.WINDOW
            return (is_window and pool.has(kind, keys[page])) or store.holds(kind, keys[page])

        return rule.depth(num_pages, has)

    def _holds_all(self, missing: MissingPages) -> bool:
        """Whether all parts of missing pages are in a tier."""
        first, num_pages = len(missing.kept), len(missing.kept) + len(missing.keys)
        needed = self._pool.rule.needed(num_pages, first)
        return all(self._store.holds(kind, missing.keys[page - first]) for kind, page in needed)

    @property
    def _has_slot(self) -> bool:
        """Whether a waiting row can begin."""
        return len(self._state.running) < self._state.max_rows

    def _most_pages(self) -> int:
        """All pages, if no row runs that may need another one."""
        return super()._most_pages() if self._state.running else self._pool.num_pages

    def _read_journal(self) -> None:
        journal = self._journal
        if self._pool.rule.has_full:
            self._unsaved.update(dict.fromkeys((PartKind.FULL, key) for key in journal.indexed))
        journal.indexed.clear()
        if journal.distrusted:
            self.drop(journal.distrusted)
            journal.distrusted.clear()

    def _save(self) -> None:
        """Save the next parts, unless others are being saved."""
        if self._is_saving:
            return
        held: list[HeldPart] = []
        while self._unsaved and len(held) < self._most_saved:
            kind, key = next(iter(self._unsaved))
            del self._unsaved[kind, key]
            if (part := self._pool.hold(kind, key)) is not None:
                held.append(part)
            elif not self._store.holds(kind, key):
                self._num_unsaved += 1
        if held:
            self._is_saving = True
            parts = [part for part, _ in held]
            self._store.save(parts, lambda: self._post(partial(self._saved, held)))

    def _saved(self, held: Sequence[HeldPart]) -> None:
        self._is_saving = False
        for part in held:
            self._pool.let_go(part)
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
