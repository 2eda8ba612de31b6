"""Every row goes on from its own state, whatever happens in whatever order.

The seeded driver of `test_pages_machine`, over a model with recurrent layers. As there, faults that
are put in must be noticed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from support.token_driver import drive, random_stateful_world
from triptych.core.kv.snapshots import SnapshotIndex
from triptych.schedulers.tokens import batch as token_batch
from triptych.schedulers.tokens import state_saves
from triptych.schedulers.tokens.batch import TokenBatch
from triptych.schedulers.tokens.scheduled_row import ScheduledRow


def test_every_row_goes_on_from_its_own_state() -> None:
    totals: dict[str, float] = {}
    for seed in range(60):
        world = drive(seed, 400, random_stateful_world)
        counters = world.scheduler.stats().counters
        states = world.runner.states
        moved = {"restored": states.num_restored, "gone back": states.num_gone_back}
        for name, total in (counters | moved).items():
            totals[name] = totals.get(name, 0) + total
    assert min(totals.values()) > 20, totals


_book = state_saves.book_saves
_retry = TokenBatch.retry


def publishes_before_commit(pool: Any, piece: ScheduledRow, num_rows: int) -> None:
    _book(pool, piece, num_rows)
    for position, snapshot in piece.saves:
        row, page = piece.unit, position // pool.page_size
        if len(row.keys) >= page and row.keys[page - 1] not in pool.snapshots:
            pool.snapshots._index[row.keys[page - 1]] = snapshot


def goes_on_after_running_out_of_memory(
    batch: TokenBatch, live: list[ScheduledRow], later: Iterable[Any]
) -> None:
    snapshots, batch.pool.snapshots = batch.pool.snapshots, None
    _retry(batch, live, later)
    batch.pool.snapshots = snapshots


def saves_a_page_too_early(pool: Any, piece: ScheduledRow, num_rows: int) -> None:
    _book(pool, piece, num_rows)
    piece.saves = tuple((position - 1, snapshot) for position, snapshot in piece.saves)


def goes_on_after_a_wrong_draft(batch: TokenBatch, piece: ScheduledRow, num_accepted: int) -> int:
    return num_accepted


def gives_back_what_is_indexed(pool: Any, piece: ScheduledRow) -> None:
    for key in piece.unit.keys:
        if key in pool.snapshots:
            pool.snapshots._free.append(pool.snapshots._index[key])
    state_saves.settle_saves(pool, piece)


def finds_any(index: SnapshotIndex, key: bytes) -> int:
    return index.hold(next(iter(index._index)))


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (token_batch, "book_saves", publishes_before_commit),
        (token_batch, "book_saves", saves_a_page_too_early),
        (token_batch, "settle_saves", gives_back_what_is_indexed),
        (TokenBatch, "retry", goes_on_after_running_out_of_memory),
        (TokenBatch, "_num_kept", goes_on_after_a_wrong_draft),
        (SnapshotIndex, "find", finds_any),
    ],
)
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError)):  # noqa: PT012 - any of many worlds
        for seed in range(40):
            drive(seed, 300, random_stateful_world)
