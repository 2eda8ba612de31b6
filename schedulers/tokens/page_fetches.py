"""Pages on their way into the cache, which rows wait for.

Owns the fetches of rows' prompts, from another engine (`schedulers.roles.page_exchange`) or from a
lower tier (`schedulers.tokens.stored_pages`). Uses only the prefix index: arriving pages are
published there as if a row of this engine had computed them; a row waits for an arriving page as it
waits for one that another row computes; missing pages are computed. Knows no sockets, no files, no
tensors.

All methods run on the loop's thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from typing import Protocol

from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.kv.pages import Lease
from triptych.core.kv.transfer.client import PageFetch
from triptych.schedulers.executors import Post
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.page_exchange import PageExchange
from triptych.schedulers.tokens.state import SequenceState

_MAX_SHARE = 0.5
"""The share of the pool that pages in transfer may hold: running rows need the rest."""


class ExchangingScheduler(Protocol):
    """The part of `schedulers.tokens.scheduler.TokenScheduler` that an exchange uses."""

    tokens: TokenBatch

    def row_of(self, job_id: str) -> SequenceState | None:
        """The sequence of a job that has not ended."""
        ...

    def cancel(self, job_id: str) -> None:
        """End a job."""
        ...

    def note_change(self) -> None:
        """Make chosen steps outdated: rows or pages have changed."""
        ...


class PageSource(Protocol):
    """Fetches pages on a thread of its own."""

    def start(self, fetch: PageFetch) -> None:
        """Start fetching pages."""
        ...

    def stop(self, fetch: PageFetch) -> None:
        """End a fetch early; `ended` follows."""
        ...


@dataclass(frozen=True, slots=True)
class MissingPages:
    """Pages of a row that are to be fetched: `keys`, from page `first` on.

    The pages of `kept` are cached and stay as they are. Rows wait for those of `awaited`.
    """

    kept: Sequence[bytes]
    first: int
    keys: Sequence[bytes]
    awaited: Sequence[bytes]


@dataclass(eq=False, slots=True)
class OpenFetch:
    """A fetch and the pages that it fills; `num_taken` of them no lease held before.

    Rows wait for the pages of `awaited`.
    """

    row: SequenceState
    lease: Lease
    keys: Sequence[bytes]
    awaited: list[bytes]
    started_s: float
    num_taken: int
    num_published: int = 0
    is_dropped: bool = False
    fetch: PageFetch | None = None


class PageFetches(PageExchange):
    """Fetches pages of rows from `source`."""

    def __init__(self, scheduler: ExchangingScheduler, source: PageSource) -> None:
        self._state = scheduler.tokens.state
        self._note_change = scheduler.note_change
        self._post: Post = lambda call: call()
        self._page_source = source
        self._ids = count()
        self._open: dict[SequenceState, OpenFetch] = {}

    def connect(self, post: Post) -> None:
        """Register `post`, which schedules a call on the loop's thread."""
        self._post = post

    def on_end(self, row: SequenceState) -> None:
        """End the fetch of a row that has ended."""
        awaited = self._open.get(row)
        if awaited is not None and awaited.fetch is not None:
            awaited.is_dropped = True
            self._page_source.stop(awaited.fetch)

    def _missing(self, row: SequenceState, most: int = sys.maxsize) -> MissingPages:
        """The full pages of a row, of the first `most`, that are neither cached nor coming.

        In a model with several kinds of parts these are the pages that lack one that the row needs
        to go on after the last; none if that one is coming.
        """
        state, pool = self._state, self._state.pool
        keys = row.lookup_keys(pool.page_size)[:most]
        first = num_found = len(pool.peek(keys))
        num_kept = num_found
        if not pool.rule.is_divided:
            first += sum(1 for _ in takewhile(state.is_coming, keys[num_found:]))
        elif num_found < len(keys) and not state.is_coming(keys[-1]):
            first = num_kept = pool.num_kept(keys)
        else:
            first = len(keys)
        awaited = keys[num_found if pool.rule.is_divided else first :]
        return MissingPages(keys[:num_kept], first, keys[first:], awaited)

    def _start(self, row: SequenceState, missing: MissingPages, request: TokenRequest) -> bool:
        """Fetch missing pages; false if there is no room for them."""
        state, pool, num_pages = self._state, self._state.pool, len(missing.keys)
        num_taken = num_pages + pool.num_unheld(missing.kept)
        num_carried = sum(each.num_taken for each in self._open.values())
        if num_carried + num_taken > self._most_pages():
            return False
        lease = pool.lease_arriving(missing.kept, num_pages, self._num_spare_windows())
        if lease is None:
            return False
        awaited = OpenFetch(
            *(row, lease, missing.keys, [*missing.awaited], time.monotonic(), num_taken)
        )
        self._open[row] = awaited
        state.in_transfer.add(lease)
        state.arriving.update(missing.awaited)
        awaited.fetch = PageFetch(
            fetch_id=next(self._ids),
            request=request,
            first=missing.first,
            num_pages=num_pages,
            parts=pool.arriving_parts(lease, missing.keys),
            arrived=lambda num: self._post(partial(self._take, awaited, num)),
            ended=lambda: self._post(partial(self._end, awaited)),
        )
        self._page_source.start(awaited.fetch)
        return True

    def _num_spare_windows(self) -> int:
        """The pages of window layers that running rows may still take, to keep their windows."""
        windows = self._state.pool.windows
        if windows is None:
            return 0
        most, leases = windows.reach + 2, [row.lease for row in self._state.running]
        num_held = [len(each.window_ids) - each.first_window for each in leases if each is not None]
        return sum(max(0, most - num) for num in num_held)

    def _most_pages(self) -> int:
        """The most pages that fetches may hold."""
        return int(_MAX_SHARE * self._state.pool.num_pages)

    def _take(self, awaited: OpenFetch, num_arrived: int) -> None:
        """Publish the pages of a fetch whose parts are written.

        Where a page has several parts, all are published with the last one.
        """
        assert awaited.fetch is not None, "it was started"
        if self._state.pool.rule.is_divided:
            is_whole = num_arrived == len(awaited.fetch.parts)
            num_arrived = len(awaited.keys) if is_whole else 0
        keys = awaited.keys[awaited.num_published : num_arrived]
        awaited.num_published = num_arrived
        if keys:
            self._state.pool.publish_arrived(awaited.lease, keys)
            self._settle(awaited, None if self._state.pool.rule.is_divided else len(keys))
        self._note_change()

    def _settle(self, awaited: OpenFetch, num_pages: int | None = None) -> None:
        """Let rows wait no longer for the first pages of a fetch, or for all."""
        self._state.settle_arriving(awaited.awaited[:num_pages])
        del awaited.awaited[:num_pages]

    def _end(self, awaited: OpenFetch) -> None:
        """Close a fetch that ended: missing pages are computed."""
        self._settle(awaited)
        self._state.in_transfer.remove(awaited.lease)
        self._state.pool.release(awaited.lease)
        del self._open[awaited.row]
        self._note_change()
