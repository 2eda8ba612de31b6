"""The pool of key-value pages: leases of rows, and the index of reusable pages.

Owns page ids, leases, reference counts and the prefix index. Knows nothing of tensors, tokens or
jobs: a page is a number, its content a key (`core.kv.keys`). For a model with recurrent layers, it
also holds the snapshots of their states (`core.kv.snapshots`): pages are found up to the last one
with a snapshot at its end. The pages of layers with a window are parts of these pages
(`core.kv.windows`): pages are found up to the last one before which the parts are known that the
next token sees. `core.kv.parts` has the rule of both; parts are copied to other memories and from
there while the pool holds them.

Every page is in exactly one place: free (holds nothing), cached (full, indexed, in no lease; the
least recently used is evicted first) or leased (held by one lease or shared by several). A page is
indexed when its holder publishes it, only after the step that wrote it is over; so an indexed page
is full and never written again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from triptych.core.kv.parts import PagePart, PartKind, PartRule
from triptych.core.kv.snapshots import SnapshotIndex
from triptych.core.kv.windows import WindowPages, WindowSize


@dataclass(slots=True, eq=False)
class Lease:
    """The pages that one row holds, in token order. Created, extended and released by the pool.

    The first `num_published` are full, and were found or published; they are read, never written.
    `snapshot` has the state after the pages that were found, and is held until it is read;
    `arriving_snapshot` gets the state after pages that are copied to it. Both are -1 without one.

    Where layers with a window have pages of their own, `window_ids` are those of the first pages,
    in token order. The lease holds them from the page `first_window` on.
    """

    page_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    snapshot: int = -1
    arriving_snapshot: int = -1
    num_found: int = 0
    window_ids: list[int] = field(default_factory=list)
    first_window: int = 0

    def __len__(self) -> int:
        return len(self.page_ids)

    def windows_from(self, page: int) -> tuple[int, ...]:
        """The held ones of `window_ids`, from a page on."""
        return tuple(self.window_ids[max(page, self.first_window) :])


class HeldPart(NamedTuple):
    """A part that is copied from the device, and its page (-1 for a state)."""

    part: PagePart
    page_id: int


@dataclass(slots=True)
class PoolCounters:
    """Totals since the pool was created, in pages."""

    num_hits: int = 0
    num_evictions: int = 0
    num_duplicates: int = 0


@dataclass(slots=True)
class PageJournal:
    """Keys of pages that were indexed, and of pages whose content turned out not to be trusted.

    The owner of a lower tier reads and empties both.
    """

    indexed: list[bytes] = field(default_factory=list)
    distrusted: list[bytes] = field(default_factory=list)


class PagePool:
    """Pages `0 .. num_pages - 1` of `page_size` tokens each.

    `num_snapshots` is the number of states that can be kept; `None` for a model without states.
    `windows` is given where layers with a window have pages of their own; without `has_full` no
    layer sees all tokens.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        num_snapshots: int | None = None,
        windows: WindowSize | None = None,
        has_full: bool = True,
    ) -> None:
        assert num_pages > 0, "a pool holds at least one page"
        assert page_size > 0, "a page holds at least one token"
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.counters = PoolCounters()
        self.journal: PageJournal | None = None
        """The changes of the index, where a lower tier follows them."""
        self.snapshots = None if num_snapshots is None else SnapshotIndex(num_snapshots)
        self.windows = None if windows is None else WindowPages(windows, num_pages)
        reach = None if windows is None else windows.reach
        self.rule = PartRule(has_full, reach, num_snapshots is not None)
        """The parts that a row needs."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._leases: set[Lease] = set()
        self._held: Counter[HeldPart] = Counter()

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Indexed pages without a holder, which may be found or evicted."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that `extend` can lease."""
        return len(self._free) + len(self._cached)

    @property
    def num_leased(self) -> int:
        """Pages held by at least one lease."""
        return self.num_pages - self.num_available

    @property
    def num_leases(self) -> int:
        """Leases not yet released."""
        return len(self._leases)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def peek(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that `acquire(keys)` would find now, without pinning them."""
        found = self._indexed(keys)
        if self.rule.is_divided:
            del found[self.rule.depth(len(found), lambda kind, n: self.has(kind, keys[n])) :]
        return found

    def has(self, kind: PartKind, key: bytes) -> bool:
        """Whether a part can be found."""
        if kind is PartKind.STATE:
            return self.snapshots is not None and key in self.snapshots
        page_id = self._index.get(key)
        if page_id is None or kind is PartKind.FULL:
            return page_id is not None
        return self.windows is not None and self.windows.has(page_id)

    def num_indexed(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that are indexed, whether or not a row can go on there."""
        return len(self._indexed(keys))

    def _indexed(self, keys: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for key in keys:
            page_id = self._index.get(key)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def num_holders(self, page_id: int) -> int:
        """The number of leases that hold the page."""
        return self._num_holders[page_id]

    def acquire(self, keys: Sequence[bytes] = ()) -> Lease:
        """Find the longest indexed prefix of `keys` and lease it, in one call."""
        lease = Lease()
        self._leases.add(lease)
        self.extend_cached(lease, keys)
        if self.snapshots is not None and len(lease):
            lease.snapshot = self.snapshots.find(keys[len(lease) - 1])
        if self.windows is not None:
            self._hold_windows(lease, self.windows)
        self.counters.num_hits += len(lease)
        return lease

    def _hold_windows(self, lease: Lease, windows: WindowPages) -> None:
        """Hold the parts of found pages that the next token sees."""
        lease.num_found, lease.first_window = len(lease), max(0, len(lease) - windows.reach)
        seen = lease.page_ids[lease.first_window :]
        lease.window_ids = [-1] * lease.first_window + [windows.hold(page_id) for page_id in seen]

    def extend_cached(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Append the indexed pages of `keys` to `lease`, up to the first key without a page."""
        assert lease.num_published == len(lease), "its last page is not full"
        for page_id in self.peek(keys):
            self._join(lease, page_id)

    def _join(self, lease: Lease, page_id: int) -> None:
        """Append an indexed page to `lease`."""
        self._pin(page_id)
        lease.page_ids.append(page_id)
        lease.num_published += 1

    def _pin(self, page_id: int) -> None:
        """Add a holder to an indexed page."""
        if not self._num_holders[page_id]:
            del self._cached[page_id]
        self._num_holders[page_id] += 1

    def extend(self, lease: Lease, num_pages: int) -> None:
        """Add `num_pages` blank pages to `lease`, evicting cached ones if none is free."""
        assert lease in self._leases, "the lease has ended"
        assert num_pages <= self.num_available, "the caller checks for room"
        for _ in range(num_pages):
            page_id = self._free.pop() if self._free else self._evict()
            self._num_holders[page_id] = 1
            lease.page_ids.append(page_id)

    def extend_windows(self, lease: Lease, num_pages: int) -> None:
        """Take the parts of the first `num_pages` pages of `lease` that the next step writes to."""
        if self.windows is not None:
            for page_id in lease.page_ids[len(lease.window_ids) : num_pages]:
                lease.window_ids.append(self.windows.take(page_id))

    def leave_windows(self, lease: Lease, num_tokens: int) -> None:
        """Give up the parts that no token of `lease` sees after the first `num_tokens`.

        Those that the first token of its current page sees are held: a later row may begin there.
        """
        if self.windows is None:
            return
        first = num_tokens // self.page_size - self.windows.reach
        for page in range(lease.first_window, first):
            page_id = lease.page_ids[page]
            is_kept = self._keys[page_id] is not None
            self.windows.drop(page_id, is_kept=is_kept, is_first=page >= lease.num_found)
        lease.first_window = max(lease.first_window, first)

    def publish(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Index the next pages of `lease` under `keys`: they are full, and their step is over.

        If another page already has a key, that page stays indexed, and this one is freed with its
        lease; unless only this one has its part in layers with a window.
        """
        assert lease in self._leases, "the lease has ended"
        assert lease.num_published + len(keys) <= len(lease), "more keys than pages"
        for key in keys:
            page_id = lease.page_ids[lease.num_published]
            lease.num_published += 1
            if not self.enable_prefix_caching:
                continue
            if self.windows is not None and self.windows.has(page_id):
                self._replace(key, self.windows)
            if self._index.setdefault(key, page_id) == page_id:
                self._keys[page_id] = key
                if self.journal is not None:
                    self.journal.indexed.append(key)
            else:
                self.counters.num_duplicates += 1

    def _replace(self, key: bytes, windows: WindowPages) -> None:
        """Remove the page of `key`, if there is one without its part, for one that has it."""
        page_id = self._index.get(key)
        if page_id is not None and not windows.has(page_id):
            self._forget(page_id)

    def unpublish(self, lease: Lease, keys: Sequence[bytes] = ()) -> None:
        """Remove all pages of `lease`, and snapshots of its `keys`, from the index.

        Their content is not trusted.
        """
        assert lease in self._leases, "the lease has ended"
        for page_id in lease.page_ids:
            self._unindex(page_id)
        if self.journal is not None:
            self.journal.distrusted += keys
        if self.snapshots is not None:
            for key in keys:
                self.snapshots.drop(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove pages and snapshots from the index; a page in a lease is free after it."""
        for key in keys:
            if self.snapshots is not None:
                self.snapshots.drop(key)
            page_id = self._index.get(key)
            if page_id is not None:
                self._forget(page_id)

    def _forget(self, page_id: int) -> None:
        """Remove an indexed page; it is free unless it is in a lease."""
        self._unindex(page_id)
        if not self._num_holders[page_id]:
            del self._cached[page_id]
            self._free.append(page_id)

    def forget_all(self) -> int:
        """Remove all pages from the index; returns how many there were."""
        keys = tuple(self._index)
        self.forget(keys)
        return len(keys)

    def release(self, lease: Lease) -> None:
        """End `lease`, once: pages it alone held become cached if indexed, else free."""
        assert lease in self._leases, "a lease is released exactly once"
        self._leases.remove(lease)
        if self.snapshots is not None:
            if lease.snapshot >= 0:
                self.snapshots.let_go(lease.snapshot)
            if lease.arriving_snapshot >= 0:
                self.snapshots.give_back(lease.arriving_snapshot)
        if self.windows is not None:
            for page_id in reversed(lease.page_ids[lease.first_window : len(lease.window_ids)]):
                self.windows.drop(page_id, is_kept=self._keys[page_id] is not None)
        # Last page first: a page is useless without its predecessors, so it is evicted sooner.
        for page_id in reversed(lease.page_ids):
            self._unpin(page_id)

    def _unpin(self, page_id: int) -> None:
        """Remove a holder of a page; without one it becomes cached if indexed, else free."""
        self._num_holders[page_id] -= 1
        if not self._num_holders[page_id]:
            if self._keys[page_id] is None:
                self._free.append(page_id)
            else:
                self._cached[page_id] = None

    # Copies to other memories and from there.

    def hold(self, kind: PartKind, key: bytes) -> HeldPart | None:
        """Keep a part as it is until `let_go`, while it is copied; `None` if it is not here."""
        if not self.has(kind, key):
            return None
        if kind is PartKind.STATE:
            assert self.snapshots is not None, "it has the part"
            page_id, number = -1, self.snapshots.hold(key)
        else:
            page_id = number = self._index[key]
            self._pin(page_id)
            if kind is PartKind.WINDOW:
                assert self.windows is not None, "it has the part"
                number = self.windows.hold(page_id)
        held = HeldPart(PagePart(key, number, kind), page_id)
        self._held[held] += 1
        return held

    def let_go(self, held: HeldPart) -> None:
        """End the hold of a part."""
        assert self._held[held], "the part is not held"
        self._held[held] -= 1
        if not self._held[held]:
            del self._held[held]
        part, page_id = held
        if part.kind is PartKind.STATE:
            assert self.snapshots is not None, "the part was held"
            self.snapshots.let_go(part.number)
            return
        if part.kind is PartKind.WINDOW:
            assert self.windows is not None, "the part was held"
            self.windows.drop(page_id, is_kept=self._keys[page_id] is not None)
        self._unpin(page_id)

    def num_unheld(self, keys: Iterable[bytes]) -> int:
        """The number of indexed pages that no lease holds."""
        return sum(not self._num_holders[self._index[key]] for key in keys)

    def num_kept(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that stay as they are where a row goes on after all `keys`.

        Those are the indexed ones, up to the first without a part that the row needs. The last page
        is not one of them in a model with states: its state is not here.
        """
        num_pages = self.num_indexed(keys)
        if self.rule.has_states:
            num_pages = min(num_pages, len(keys) - 1)
        for kind, page in self.rule.ends(len(keys)):
            if page < num_pages and kind is PartKind.WINDOW and not self.has(kind, keys[page]):
                return page
        return num_pages

    def lease_arriving(self, kept: Sequence[bytes], num_pages: int, spare: int = 0) -> Lease | None:
        """Lease indexed pages and `num_pages` more, whose parts a copy is to fill.

        `None` if there is no room. `spare` pages of layers with a window are left to others.
        """
        lease, num_all = Lease(), len(kept) + num_pages
        self._leases.add(lease)
        for key in kept:
            self._join(lease, self._index[key])
        has_room = num_pages <= self.num_available
        if self.windows is not None:
            lease.first_window = max(0, num_all - self.windows.reach)
            seen = [self.windows.hold(page_id) for page_id in lease.page_ids[lease.first_window :]]
            lease.window_ids = [-1] * lease.first_window + seen
            num_taken = num_all - len(lease.window_ids)
            has_room &= num_taken + spare <= self.windows.num_available
        if self.snapshots is not None:
            has_room &= self.snapshots.can_take
        if not has_room:
            self.release(lease)
            return None
        self.extend(lease, num_pages)
        self.extend_windows(lease, num_all)
        if self.snapshots is not None:
            snapshot = self.snapshots.take()
            assert snapshot is not None, "there is room"
            lease.arriving_snapshot = snapshot
        return lease

    def arriving_parts(self, lease: Lease, keys: Sequence[bytes]) -> list[PagePart]:
        """The parts of `lease` that a copy is to fill, in order; `keys` are those of new pages."""
        first = lease.num_published
        numbers = {PartKind.FULL: lease.page_ids, PartKind.WINDOW: lease.window_ids}
        return [
            PagePart(
                keys[page - first],
                lease.arriving_snapshot if kind is PartKind.STATE else numbers[kind][page],
                kind,
            )
            for kind, page in self.rule.needed(len(lease), first)
        ]

    def publish_arrived(self, lease: Lease, keys: Sequence[bytes]) -> None:
        """Index the next pages of `lease`, as `publish` does, and the state after the last one."""
        self.publish(lease, keys)
        if lease.arriving_snapshot >= 0:
            assert self.snapshots is not None, "only models with states have snapshots"
            self.snapshots.publish(lease.arriving_snapshot, keys[-1])
            lease.arriving_snapshot = -1

    def check(self) -> None:
        """Assert that every page is in one place and all counts agree with the leases."""
        held = [*self._held.elements()]
        holders = Counter(page_id for lease in self._leases for page_id in lease.page_ids)
        holders.update(page_id for _, page_id in held if page_id >= 0)
        assert [holders[page_id] for page_id in range(self.num_pages)] == self._num_holders
        for lease in self._leases:
            assert len(set(lease.page_ids)) == len(lease), "a lease holds a page twice"
            assert lease.num_published <= len(lease)
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is both free and cached"
        assert not (free | cached) & holders.keys(), "a held page was given away"
        assert len(free) + len(cached) + len(holders) == self.num_pages, "a page is lost"
        named = {key: page_id for page_id, key in enumerate(self._keys) if key is not None}
        assert named == self._index, "the index disagrees with the pages"
        assert not free & set(named.values()), "a free page can be found"
        assert cached <= set(named.values()), "a cached page cannot be found"
        if self.snapshots is not None:
            self.snapshots.check()
        if self.windows is not None:
            windows = [page_id for part, page_id in held if part.kind is PartKind.WINDOW]
            for lease in self._leases:
                windows += lease.page_ids[lease.first_window : len(lease.window_ids)]
            self.windows.check(windows, set(named.values()))

    def check_states(self, *, num_written: int, num_read: int) -> None:
        """Assert that steps in flight, leases and copies account for snapshots in use."""
        if self.snapshots is None:
            assert not num_written + num_read, "no snapshot is in use"
            return
        num_written += sum(lease.arriving_snapshot >= 0 for lease in self._leases)
        num_read += sum(lease.snapshot >= 0 for lease in self._leases)
        num_read += sum(part.kind is PartKind.STATE for part, _ in self._held.elements())
        assert num_written == self.snapshots.num_pending, "a snapshot is lost"
        assert num_read == self.snapshots.num_holds, "a snapshot is held by nothing"

    def _evict(self) -> int:
        page_id, _ = self._cached.popitem(last=False)
        self._unindex(page_id)
        self.counters.num_evictions += 1
        return page_id

    def _unindex(self, page_id: int) -> None:
        key = self._keys[page_id]
        if key is not None:
            del self._index[key]
            self._keys[page_id] = None
            if self.windows is not None:
                self.windows.forget(page_id)
