"""Pages below the device: written to host memory and disk, and fetched from there.

Owns one thread, which makes all copies, and what it does first: fetches, since rows wait for them;
then copies from the device; then writes to disk, part by part. Knows no leases: parts of pages that
are saved or fetched stay as they are until a callback. Knows no tokens: a page has a key.

A part is written to the host tier when it is complete, not when it leaves the device: a step never
waits for a copy, and the part survives the process once it is on disk, too. A part that leaves the
host tier is written to disk first. Each kind of parts has a shelf of its own in both tiers, which
keeps those used last. Pages are pinned and dropped with all their parts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from triptych.core.kv.parts import PagePart, PartKind
from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.memory import PageMemory

_ARRIVED_PARTS = 16  # between two reports of a fetch
_CLOSE_S = 0.5
"""How long `close` goes on writing to disk; other models may wait for it."""
_PAUSE_S = 30.0
"""How long nothing is written after the disk refused a page."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shelf:
    """The parts of one kind: their memory on the device, and their tiers."""

    memory: PageMemory
    host: HostTier
    disk: DiskTier | None = None

    def holds(self, key: bytes) -> bool:
        """Whether the part of a page is in a tier."""
        return key in self.host.order or (self.disk is not None and key in self.disk.order)

    def touch(self, key: bytes) -> None:
        """Make the part of a page the one used last."""
        self.host.order.touch(key)
        if self.disk is not None:
            self.disk.order.touch(key)

    def pin(self, key: bytes) -> None:
        """Pin the part of a page in the tiers that it is in, up to half of each."""
        if self.host.order.num_pinned < self.host.num_pages // 2:
            self.host.order.pin(key)
        if self.disk is not None and self.disk.order.num_pinned < self.disk.num_pages // 2:
            self.disk.order.pin(key)

    def unpin(self, key: bytes) -> None:
        """Let the part of a page give way to others again."""
        self.host.order.unpin(key)
        if self.disk is not None:
            self.disk.order.unpin(key)

    def drop(self, key: bytes) -> None:
        """Remove the part of a page from both tiers."""
        self.host.drop(key)
        if self.disk is not None:
            self.disk.drop(key)

    def keys(self) -> set[bytes]:
        """The pages with a part in a tier."""
        return {*self.host.order.keys(), *(() if self.disk is None else self.disk.order.keys())}

    def close(self) -> None:
        """Release both tiers."""
        self.host.close()
        if self.disk is not None:
            self.disk.close()


class PageTiers:
    """The tiers of one model. Implements `schedulers.tokens.stored_pages.PageStore`.

    All methods may be called from any thread; callbacks run on the tiers' own.
    """

    def __init__(self, shelves: Mapping[PartKind, Shelf]) -> None:
        self.counts = Counter(
            kv_host_page_hits_total=0,
            kv_disk_page_hits_total=0,
            kv_host_page_evictions_total=0,
            kv_disk_page_evictions_total=0,
            kv_disk_pages_refused_total=0,
            kv_disk_write_errors_total=0,
        )
        """Counters by series name. All names are present from the start."""
        self._shelves = shelves
        self._fetches: deque[PageFetch] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._unwritten: OrderedDict[tuple[PartKind, bytes], None] = OrderedDict()
        """Parts in the host tier alone."""
        self._barred: Counter[bytes] = Counter()  # to be dropped
        self._num_clearing = 0
        self._pinned: dict[bytes, str] = {}  # with the tenant that pinned it
        self._resume_s = 0.0
        self._end_s: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="triptych-tiers", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def gauges(self) -> dict[str, float]:
        """The bytes in each tier, by series name."""
        shelves = self._shelves.values()
        disks = [shelf.disk.num_bytes for shelf in shelves if shelf.disk is not None]
        host_bytes = sum(shelf.host.num_bytes for shelf in shelves)
        return {"kv_host_bytes": host_bytes, "kv_disk_bytes": sum(disks)}

    def num_held(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages with a part in a tier; it may leave it at any time."""
        held = takewhile(lambda key: any(self.holds(kind, key) for kind in self._shelves), keys)
        return sum(1 for _ in held)

    def holds(self, kind: PartKind, key: bytes) -> bool:
        """Whether a part is in a tier; it may leave it at any time."""
        if self._num_clearing or self._barred.get(key):
            return False
        shelf = self._shelves.get(kind)
        return shelf is not None and shelf.holds(key)

    def start(self, fetch: PageFetch) -> None:
        """Copy parts to the device, up to the first that is in no tier."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify()

    def stop(self, fetch: PageFetch) -> None:
        """End a fetch early; `ended` follows."""
        fetch.is_stopped = True

    def save(self, parts: Sequence[PagePart], saved: Callable[[], None]) -> None:
        """Copy parts from the device; `saved` is called once that is over."""
        self._call(partial(self._save, parts, saved))

    def touch(self, parts: Iterable[tuple[PartKind, bytes]]) -> None:
        """Make the parts of a prompt those used last, the first ones as the very last."""
        self._call(partial(self._touch, tuple(parts)))

    def pin(self, keys: Sequence[bytes], tenant: str) -> int:
        """Keep pages until they are unpinned or dropped, at most half of what the tiers hold.

        One of several tenants keeps a quarter of that at most. Pages that are still to be saved are
        kept from then on. Returns how many of the first pages are kept.
        """
        shelf = next(iter(self._shelves.values()))
        lowest = (shelf.disk or shelf.host).num_pages
        with self._changed:
            num_left = lowest // 2 - len(self._pinned)
            if tenant:
                own = sum(each == tenant for each in self._pinned.values())
                num_left = min(num_left, lowest // 8 - own)
            for number, key in enumerate(keys):
                num_left -= key not in self._pinned
                if num_left < 0:
                    keys = keys[:number]
                    break
                self._pinned.setdefault(key, tenant)
        self._call(partial(self._pin, tuple(keys)))
        return len(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let pages give way to others again."""
        unpinned = tuple(keys)
        with self._changed:
            self._forget_pins(unpinned)
        self._call(partial(self._unpin, unpinned))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove pages; from now on they are not found."""
        dropped = tuple(keys)
        with self._changed:
            self._barred.update(dropped)
            self._forget_pins(dropped)
        self._call(partial(self._drop, dropped))

    def _forget_pins(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._pinned.pop(key, None)

    def clear(self) -> None:
        """Remove all pages; from now on none is found."""
        with self._changed:
            self._num_clearing += 1
            self._pinned.clear()
        self._call(self._clear)

    def close(self) -> None:
        """End all fetches, save what was to be saved, and release both tiers."""
        with self._changed:
            self._end_s = time.monotonic() + _CLOSE_S
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        for shelf in self._shelves.values():
            shelf.close()

    # On the tiers' thread.

    def _call(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def _run(self) -> None:
        while (work := self.next_work()) is not None:
            try:
                work()
            except Exception:  # a bug of our own must not end the thread
                _log.exception("a page was not moved between tiers")

    @property
    def has_work(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._fetches or self._calls or self._unwritten)

    def next_work(self) -> Callable[[], None] | None:
        """Wait for the next thing to do, and return it; `None` at the end."""
        with self._changed:
            while True:
                if self._fetches:
                    return partial(self._fetch, self._fetches.popleft())
                if self._calls:
                    return self._calls.popleft()
                now_s = time.monotonic()
                may_write = bool(self._unwritten) and now_s >= self._resume_s
                if self._end_s is not None and (now_s >= self._end_s or not may_write):
                    return None
                if may_write:
                    return partial(self._write, *next(iter(self._unwritten)))
                self._changed.wait(self._resume_s - now_s if self._unwritten else None)

    def _fetch(self, fetch: PageFetch) -> None:
        try:
            for part in fetch.parts:
                if fetch.is_stopped or self._end_s is not None or not self._load(part):
                    break
                fetch.num_arrived += 1
                if fetch.num_arrived % _ARRIVED_PARTS == 0:
                    fetch.arrived(fetch.num_arrived)
            if fetch.num_arrived % _ARRIVED_PARTS:
                fetch.arrived(fetch.num_arrived)
        finally:
            fetch.ended()

    def _load(self, part: PagePart) -> bool:
        """Copy a part to the device, and from disk to the host tier; false if it is not here."""
        if not self.holds(part.kind, part.key):
            return False
        shelf = self._shelves[part.kind]
        content = shelf.host.page(part.key)
        if content is not None:
            self.counts["kv_host_page_hits_total"] += 1
            shelf.host.order.touch(part.key)
        else:
            content = self._read(part.kind, part.key)
            if content is None:
                return False
            self.counts["kv_disk_page_hits_total"] += 1
        shelf.memory.write(part.number, content)
        return True

    def _read(self, kind: PartKind, key: bytes) -> memoryview | None:
        """Read a part from disk, into the host tier if that has room."""
        shelf = self._shelves[kind]
        assert shelf.disk is not None, "the part is on disk"
        shelf.disk.order.touch(key)  # before room is made, which may evict from disk as well
        room = self._room(kind, key)
        content = memoryview(bytearray(shelf.memory.page_bytes)) if room is None else room
        is_whole = False
        try:
            is_whole = shelf.disk.read(key, content)
        finally:
            if not is_whole:
                shelf.host.drop(key)
                self.counts["kv_disk_pages_refused_total"] += 1
        self._pin((key,))
        return content if is_whole else None

    def _room(self, kind: PartKind, key: bytes) -> memoryview | None:
        """Memory for a part in the host tier; `None` if all parts there are pinned."""
        host = self._shelves[kind].host
        if host.is_full:
            oldest = host.order.oldest
            if oldest is None:
                return None
            if (kind, oldest) in self._unwritten:
                self._write(kind, oldest)
            host.drop(oldest)
            self.counts["kv_host_page_evictions_total"] += 1
        return host.add(key)

    def _save(self, parts: Sequence[PagePart], saved: Callable[[], None]) -> None:
        try:
            for part in parts:
                shelf = self._shelves.get(part.kind)
                if shelf is not None and part.key not in shelf.host.order:
                    self._copy(part)
        finally:
            saved()

    def _copy(self, part: PagePart) -> None:
        """Copy a part from the device."""
        key, number, kind = part
        shelf, content = self._shelves[kind], self._room(kind, key)
        if content is None:
            return
        try:
            shelf.memory.read(number, content)
        except BaseException:
            shelf.host.drop(key)
            raise
        if shelf.disk is not None and key not in shelf.disk.order:
            self._unwritten[kind, key] = None
        self._pin((key,))

    def _write(self, kind: PartKind, key: bytes) -> None:
        """Write a part of the host tier to disk, in place of one used longer ago."""
        del self._unwritten[kind, key]
        shelf = self._shelves[kind]
        content, disk = shelf.host.page(key), shelf.disk
        assert disk is not None, "parts are to be written only with a disk"
        if content is None or time.monotonic() < self._resume_s:
            return
        while disk.is_full:
            oldest = disk.order.oldest
            if oldest is None:
                return
            disk.drop(oldest)
            self.counts["kv_disk_page_evictions_total"] += 1
        try:
            disk.write(key, content)
        except OSError as error:
            self.counts["kv_disk_write_errors_total"] += 1
            self._resume_s = time.monotonic() + _PAUSE_S
            _log.warning("cached pages are not written to disk for %g s: %s", _PAUSE_S, error)
        self._pin((key,))

    def _touch(self, parts: Sequence[tuple[PartKind, bytes]]) -> None:
        for kind, key in reversed(parts):
            if (shelf := self._shelves.get(kind)) is not None:
                shelf.touch(key)

    def _pin(self, keys: Sequence[bytes]) -> None:
        """Pin pages in the tiers that they are in; host memory has fewer pages than the disk."""
        for key in keys:
            if key not in self._pinned:
                continue  # unpinned or dropped since
            for shelf in self._shelves.values():
                shelf.pin(key)

    def _unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._pinned:
                continue  # pinned since
            for shelf in self._shelves.values():
                shelf.unpin(key)

    def _clear(self) -> None:
        """Remove all pages of both tiers."""
        self._remove(set[bytes]().union(*(shelf.keys() for shelf in self._shelves.values())))
        with self._changed:
            self._num_clearing -= 1

    def _drop(self, keys: Sequence[bytes]) -> None:
        self._remove(keys)
        with self._changed:
            self._barred.subtract(keys)
            self._barred = +self._barred

    def _remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for kind, shelf in self._shelves.items():
                self._unwritten.pop((kind, key), None)
                shelf.drop(key)
