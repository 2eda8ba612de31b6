"""Pages below the device: written to host memory and disk, and fetched from there.

Owns one thread, which makes all copies, and what it does first: fetches, since rows wait for them;
then copies from the device; then writes to disk, page by page. Knows no leases: pages that are
saved or fetched stay as they are until a callback. Knows no tokens: a page has a key.

A page is written to the host tier when it is complete, not when it leaves the device: a step never
waits for a copy, and the page survives the process once it is on disk, too. A page that leaves the
host tier is written to disk first. Both tiers keep the pages used last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from triptych.core.kv.tiers.disk import DiskTier
from triptych.core.kv.tiers.host import HostTier
from triptych.core.kv.transfer.client import PageFetch
from triptych.core.kv.transfer.memory import PageMemory

_ARRIVED_PAGES = 16  # between two reports of a fetch
_CLOSE_S = 0.5
"""How long `close` goes on writing to disk; other models may wait for it."""
_PAUSE_S = 30.0
"""How long nothing is written after the disk refused a page."""
_log = logging.getLogger(__name__)


class PageTiers:
    """The tiers of one model. Implements `schedulers.tokens.stored_pages.PageStore`.

    All methods may be called from any thread; callbacks run on the tiers' own.
    """

    def __init__(self, memory: PageMemory, host: HostTier, disk: DiskTier | None = None) -> None:
        self.counts = Counter(
            kv_host_page_hits_total=0,
            kv_disk_page_hits_total=0,
            kv_host_page_evictions_total=0,
            kv_disk_page_evictions_total=0,
            kv_disk_pages_refused_total=0,
            kv_disk_write_errors_total=0,
        )
        """Counters by series name. All names are present from the start."""
        self._memory = memory
        self._host = host
        self._disk = disk
        self._fetches: deque[PageFetch] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()  # in the host tier alone
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
        disk_bytes = 0 if self._disk is None else self._disk.num_bytes
        return {"kv_host_bytes": self._host.num_bytes, "kv_disk_bytes": disk_bytes}

    def num_held(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that are in a tier; they may leave it at any time."""
        for number, key in enumerate(keys):
            if not self._holds(key):
                return number
        return len(keys)

    def _holds(self, key: bytes) -> bool:
        if self._num_clearing or self._barred.get(key):
            return False
        return key in self._host.order or (self._disk is not None and key in self._disk.order)

    def start(self, fetch: PageFetch) -> None:
        """Copy pages to the device, up to the first that is in no tier."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify()

    def stop(self, fetch: PageFetch) -> None:
        """End a fetch early; `ended` follows."""
        fetch.is_stopped = True

    def save(self, pages: Sequence[tuple[bytes, int]], saved: Callable[[], None]) -> None:
        """Copy pages, `(key, page_id)`, from the device; `saved` is called once that is over."""
        self._call(partial(self._save, pages, saved))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make the pages of a prompt those used last, its first page as the very last."""
        self._call(partial(self._touch, tuple(keys)))

    def pin(self, keys: Sequence[bytes], tenant: str) -> int:
        """Keep pages until they are unpinned or dropped, at most half of what the tiers hold.

        One of several tenants keeps a quarter of that at most. Pages that are still to be saved are
        kept from then on. Returns how many of the first pages are kept.
        """
        lowest = self._host.num_pages if self._disk is None else self._disk.num_pages
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
        self._host.close()
        if self._disk is not None:
            self._disk.close()

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
                    return partial(self._write, next(iter(self._unwritten)))
                self._changed.wait(self._resume_s - now_s if self._unwritten else None)

    def _fetch(self, fetch: PageFetch) -> None:
        try:
            for key, page_id in zip(fetch.keys, fetch.page_ids, strict=True):
                if fetch.is_stopped or self._end_s is not None or not self._load(key, page_id):
                    break
                fetch.num_arrived += 1
                if fetch.num_arrived % _ARRIVED_PAGES == 0:
                    fetch.arrived(fetch.num_arrived)
            if fetch.num_arrived % _ARRIVED_PAGES:
                fetch.arrived(fetch.num_arrived)
        finally:
            fetch.ended()

    def _load(self, key: bytes, page_id: int) -> bool:
        """Copy a page to the device, and from disk to the host tier; false if it is not here."""
        if not self._holds(key):
            return False
        content = self._host.page(key)
        if content is not None:
            self.counts["kv_host_page_hits_total"] += 1
            self._host.order.touch(key)
        else:
            content = self._read(key)
            if content is None:
                return False
            self.counts["kv_disk_page_hits_total"] += 1
        self._memory.write(page_id, content)
        return True

    def _read(self, key: bytes) -> memoryview | None:
        """Read a page from disk, into the host tier if that has room."""
        assert self._disk is not None, "the page is on disk"
        self._disk.order.touch(key)  # before room is made, which may evict from disk as well
        room = self._room(key)
        content = memoryview(bytearray(self._memory.page_bytes)) if room is None else room
        is_whole = False
        try:
            is_whole = self._disk.read(key, content)
        finally:
            if not is_whole:
                self._host.drop(key)
                self.counts["kv_disk_pages_refused_total"] += 1
        self._pin((key,))
        return content if is_whole else None

    def _room(self, key: bytes) -> memoryview | None:
        """Memory for a page in the host tier; `None` if all pages there are pinned."""
        if self._host.is_full:
            oldest = self._host.order.oldest
            if oldest is None:
                return None
            if oldest in self._unwritten:
                self._write(oldest)
            self._host.drop(oldest)
            self.counts["kv_host_page_evictions_total"] += 1
        return self._host.add(key)

    def _save(self, pages: Sequence[tuple[bytes, int]], saved: Callable[[], None]) -> None:
        try:
            for key, page_id in pages:
                if key not in self._host.order:
                    self._copy(key, page_id)
        finally:
            saved()

    def _copy(self, key: bytes, page_id: int) -> None:
        """Copy a page from the device."""
        content = self._room(key)
        if content is None:
            return
        try:
            self._memory.read(page_id, content)
        except BaseException:
            self._host.drop(key)
            raise
        if self._disk is not None and key not in self._disk.order:
            self._unwritten[key] = None
        self._pin((key,))

    def _write(self, key: bytes) -> None:
        """Write a page of the host tier to disk, in place of one used longer ago."""
        del self._unwritten[key]
        content, disk = self._host.page(key), self._disk
        assert disk is not None, "pages are to be written only with a disk"
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

    def _touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._host.order.touch(key)
            if self._disk is not None:
                self._disk.order.touch(key)

    def _pin(self, keys: Sequence[bytes]) -> None:
        """Pin pages in the tiers that they are in; host memory has fewer pages than the disk."""
        for key in keys:
            if key not in self._pinned:
                continue  # unpinned or dropped since
            if self._host.order.num_pinned < self._host.num_pages // 2:
                self._host.order.pin(key)
            if self._disk is not None:
                self._disk.order.pin(key)

    def _unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._pinned:
                continue  # pinned since
            self._host.order.unpin(key)
            if self._disk is not None:
                self._disk.order.unpin(key)

    def _clear(self) -> None:
        """Remove all pages of both tiers."""
        disk = () if self._disk is None else self._disk.order.keys()
        self._remove({*self._host.order.keys(), *disk})
        with self._changed:
            self._num_clearing -= 1

    def _drop(self, keys: Sequence[bytes]) -> None:
        self._remove(keys)
        with self._changed:
            self._barred.subtract(keys)
            self._barred = +self._barred

    def _remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._unwritten.pop(key, None)
            self._host.drop(key)
            if self._disk is not None:
                self._disk.drop(key)
