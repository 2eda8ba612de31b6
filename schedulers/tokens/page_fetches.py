"""Pages on their way into the cache, which rows wait for.

Owns the fetches of rows' prompts, from another engine (`schedulers.roles.page_exchange`) or from a
lower tier (`schedulers.tokens.stored_pages`). Uses only the prefix index: arriving pages are
published there as if a row of this engine had computed them; a row waits for an arriving page as it
waits for one that another row computes; missing pages are computed. Knows no sockets, no files, no
tensors.

All methods run on the loop's thread.
"""

from __future__ import annotations

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


@dataclass(eq=False, slots=True)
class OpenFetch:
    """A fetch and the pages that it fills; `num_taken` of them no lease held before."""

    row: SequenceState
    lease: Lease
    keys: list[bytes]
    started_s: float
    num_taken: int
    num_published: int = 0
    is_dropped: bool = False
    fetch: PageFetch | None = None


@dataclass(frozen=True, slots=True)
class MissingPages:
    """The pages of a row that are neither cached nor coming: `keys`, from page `first` on.

    The pages of `found` are cached.
    """

    found: Sequence[bytes]
    first: int
    keys: Sequence[bytes]


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

    def _missing(self, row: SequenceState) -> MissingPages:
        """The full pages of a row that are neither cached nor coming."""
        pool = self._state.pool
        keys = row.lookup_keys(pool.page_size)
        num_found = len(pool.peek(keys))
        first = num_found + sum(1 for _ in takewhile(self._state.is_coming, keys[num_found:]))
        return MissingPages(keys[:num_found], first, keys[first:])

    def _start(
        self, row: SequenceState, missing: MissingPages, num_pages: int, request: TokenRequest
    ) -> bool:
        """Fetch the first `num_pages` of the missing pages; false if there is no room for them."""
        state, pool = self._state, self._state.pool
        lease = pool.acquire()
        pool.extend_cached(lease, missing.found)
        num_held = sum(pool.num_holders(page) > 1 for page in lease.page_ids)
        num_taken = len(lease) - num_held + num_pages
        num_carried = sum(each.num_taken for each in self._open.values())
        has_room = num_pages <= pool.num_available
        if not has_room or num_carried + num_taken > self._most_pages():
            pool.release(lease)
            return False
        pool.extend(lease, num_pages)
        keys = list(missing.keys[:num_pages])
        awaited = OpenFetch(row, lease, keys, time.monotonic(), num_taken)
        self._open[row] = awaited
        state.in_transfer.add(lease)
        state.arriving.update(keys)
        awaited.fetch = PageFetch(
            fetch_id=next(self._ids),
            request=request,
            first=missing.first,
            keys=keys,
            page_ids=lease.page_ids[lease.num_published :],
            arrived=lambda num: self._post(partial(self._take, awaited, num)),
            ended=lambda: self._post(partial(self._end, awaited)),
        )
        self._page_source.start(awaited.fetch)
        return True

    def _most_pages(self) -> int:
        """The most pages that fetches may hold."""
        return int(_MAX_SHARE * self._state.pool.num_pages)

    def _take(self, awaited: OpenFetch, num_arrived: int) -> None:
        """Publish the first pages of a fetch, which are written."""
        keys = awaited.keys[awaited.num_published : num_arrived]
        self._state.pool.publish(awaited.lease, keys)
        self._state.arriving.difference_update(keys)
        awaited.num_published = num_arrived
        self._note_change()

    def _end(self, awaited: OpenFetch) -> None:
        """Close a fetch that ended: missing pages are computed."""
        self._state.arriving.difference_update(awaited.keys[awaited.num_published :])
        self._state.in_transfer.remove(awaited.lease)
        self._state.pool.release(awaited.lease)
        del self._open[awaited.row]
        self._note_change()
