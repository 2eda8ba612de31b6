"""Which states of rows are saved as snapshots, in models with recurrent layers.

Owns the choice. A row saves its state

- at the end of the last page of its prompt that a later lookup can find, and where its prompt parts
  from cached pages whose state is not known, so that the next prompt that parts there hits; these
  stay until they are the least recently used ones;
- where another row waits for its pages;
- at some pages between, where memory is free: a later prompt may part there from this one, as after
  the instructions that many requests have in common. Their distances double, up to a limit;
- at the last page's end of every step: its progress, where it goes on if it is preempted, and where
  the next turn of a conversation begins. A row keeps one of these, unless another row found it. The
  last one is overwritten before the next one is known only where no other is free.

No state after a draft is saved: the draft may be wrong. A snapshot can be found once its step is
over, as a page. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from triptych.core.kv.pages import PagePool
from triptych.core.kv.snapshots import SnapshotIndex
from triptych.schedulers.tokens.scheduled_row import ScheduledRow
from triptych.schedulers.tokens.state import SequenceState

_LEAST_SPARE_TOKENS, _SPARE_TOKENS = 64, 256
"""The first place and the largest distance of snapshots that are saved where memory is free.

Each divides a prompt's step; fewer tokens are computed as fast as they are found.
"""


def plan_saves(pool: PagePool, row: SequenceState) -> None:
    """Choose the pages of a row that starts now after which its state is saved.

    Lower tiers keep what a row needs to go on there, in models with windows as well.
    """
    if not (pool.rule.is_divided and pool.enable_prefix_caching):
        return
    assert row.lease is not None, "it starts"
    keys = row.keys[: (row.num_known - 1) // pool.page_size]
    row.saved_pages = {len(keys), pool.num_indexed(keys), row.lease.num_published}
    row.spare_pages = _spare_pages(len(keys), pool.page_size) - row.saved_pages


def _spare_pages(num_pages: int, page_size: int) -> set[int]:
    """Pages of a prompt after which another may part from it."""
    most = max(1, _SPARE_TOKENS // page_size)
    least = -(-_LEAST_SPARE_TOKENS // page_size)
    doubled = {2**power for power in range(most.bit_length()) if least <= 2**power < num_pages}
    return doubled.union(range(most, num_pages, most))


def book_saves(pool: PagePool, piece: ScheduledRow, num_rows: int) -> None:
    """Take the snapshots that a step saves of one of `num_rows` running rows."""
    snapshots = pool.snapshots
    if snapshots is None or not pool.enable_prefix_caching:
        return
    row, size = piece.unit, pool.page_size
    first, last = piece.start // size, piece.known_end // size
    if first == last:
        return
    taken = [(page, snapshots.take()) for page in sorted(row.saved_pages) if first < page <= last]
    if last not in row.saved_pages and 2 * num_rows <= snapshots.num_snapshots:
        if not snapshots.has_free:
            _drop_progress(snapshots, row)
        taken.append((last, snapshots.take()))
    _add_saves(piece, taken, size)


def book_spares(pool: PagePool, piece: ScheduledRow) -> None:
    """Take free snapshots for other pages of a prompt, after all rows of the step have theirs."""
    snapshots, row, size = pool.snapshots, piece.unit, pool.page_size
    if snapshots is None or not row.spare_pages:
        return
    first, last = piece.start // size, piece.known_end // size
    spare = [page for page in row.spare_pages - row.saved_pages if first < page < last]
    _add_saves(piece, [(page, snapshots.take_spare()) for page in sorted(spare)], size)


def _add_saves(
    piece: ScheduledRow, taken: Iterable[tuple[int, int | None]], page_size: int
) -> None:
    """Save the states after pages in the snapshots taken for them, if there were any."""
    found = [(page * page_size, snapshot) for page, snapshot in taken if snapshot is not None]
    piece.saves = tuple(sorted((*piece.saves, *found)))
    piece.unit.pending_pages.update(position // page_size for position, _ in found)


def _drop_progress(snapshots: SnapshotIndex, row: SequenceState) -> None:
    """Free the snapshot of the row's last progress, unless another row found it, or may do so."""
    if row.progress_page:
        key = row.keys[row.progress_page - 1]
        if row.progress_page in row.spare_pages:
            snapshots.spare(key)
        elif not snapshots.is_found(key):
            snapshots.drop(key)
    row.progress_page = 0


def publish_saves(pool: PagePool, piece: ScheduledRow) -> None:
    """Index the snapshots of a step that is over; its pages are published."""
    row, last = piece.unit, piece.known_end // pool.page_size
    for position, snapshot in piece.saves:
        assert pool.snapshots is not None, "only rows with states save them"
        page = position // pool.page_size
        key = row.keys[page - 1]
        is_spare = page < last and page not in row.saved_pages
        is_own = pool.snapshots.publish(snapshot, key, is_spare=is_spare)
        if is_own and page == last and page not in row.saved_pages:
            _drop_progress(pool.snapshots, row)
            row.progress_page = page
        row.pending_pages.discard(page)
    piece.saves = ()


def settle_saves(pool: PagePool, piece: ScheduledRow) -> None:
    """Let go of the snapshots of a step that is over, and free those that it did not publish."""
    if pool.snapshots is None:
        return
    for position, snapshot in piece.saves:
        pool.snapshots.give_back(snapshot)
        piece.unit.pending_pages.discard(position // pool.page_size)
    piece.saves = ()
    if piece.restored >= 0:
        pool.snapshots.let_go(piece.restored)
        piece.restored = -1
