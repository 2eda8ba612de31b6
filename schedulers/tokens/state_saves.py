"""Which states of rows are saved as snapshots, in models with recurrent layers.

Owns the choice. A row saves its state

- at the end of the last page of its prompt that a later lookup can find, and where its prompt parts
  from cached pages whose state is not known, so that the next prompt that parts there hits; these
  stay until they are the least recently used ones;
- where another row waits for its pages;
- at the last page's end of every step: its progress, where it goes on if it is preempted, and where
  the next turn of a conversation begins. A row keeps one of these, unless another row found it. The
  last one is overwritten before the next one is known only where no other is free.

A snapshot can be found once its step is over, as a page. Knows no tensors.
"""

from __future__ import annotations

from triptych.core.kv.pages import PagePool
from triptych.core.kv.snapshots import SnapshotIndex
from triptych.schedulers.tokens.state import ScheduledRow, SequenceState


def plan_saves(pool: PagePool, row: SequenceState) -> None:
    """Choose the pages of a row that starts now after which its state is saved."""
    if pool.snapshots is None or not pool.enable_prefix_caching:
        return
    keys = row.keys[: (row.num_known - 1) // pool.page_size]
    row.saved_pages = {len(keys), pool.num_indexed(keys)}


def book_saves(pool: PagePool, piece: ScheduledRow, num_rows: int) -> None:
    """Take the snapshots that a step saves of one of `num_rows` running rows."""
    snapshots = pool.snapshots
    if snapshots is None or not pool.enable_prefix_caching:
        return
    row, size = piece.unit, pool.page_size
    first, last = piece.start // size, (piece.start + piece.num_tokens) // size
    if first == last:
        return
    taken = [(page, snapshots.take()) for page in sorted(row.saved_pages) if first < page <= last]
    if last not in row.saved_pages and 2 * num_rows <= snapshots.num_snapshots:
        if not snapshots.has_free:
            _drop_progress(snapshots, row)
        taken.append((last, snapshots.take()))
    piece.saves = tuple(
        [(page * size, snapshot) for page, snapshot in taken if snapshot is not None]
    )
    row.pending_pages.update(position // size for position, _ in piece.saves)


def _drop_progress(snapshots: SnapshotIndex, row: SequenceState) -> None:
    """Free the snapshot of the row's last progress, unless another row found it."""
    if row.progress_key is not None and not snapshots.is_found(row.progress_key):
        snapshots.drop(row.progress_key)
    row.progress_key = None


def publish_saves(pool: PagePool, piece: ScheduledRow) -> None:
    """Index the snapshots of a step that is over; its pages are published."""
    row = piece.unit
    for position, snapshot in piece.saves:
        assert pool.snapshots is not None, "only rows with states save them"
        page = position // pool.page_size
        key = row.keys[page - 1]
        is_own = pool.snapshots.publish(snapshot, key)
        if is_own and page not in row.saved_pages:
            _drop_progress(pool.snapshots, row)
            row.progress_key = key
        row.pending_pages.discard(page)
    piece.saves = ()


def give_back_saves(pool: PagePool, piece: ScheduledRow) -> None:
    """Free the snapshots of a step that is over and whose results are not used."""
    for position, snapshot in piece.saves:
        assert pool.snapshots is not None, "only rows with states save them"
        pool.snapshots.give_back(snapshot)
        piece.unit.pending_pages.discard(position // pool.page_size)
    piece.saves = ()
