"""The document store's interface for coroutines.

Owns the thread on which the database is read and written, so that no disk access runs on an event
loop, and the errors for a failing disk. `documents` defines the documents.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, Self, TypeVar

from triptych.core.errors import Unavailable
from triptych.core.options.config import StoreOptions
from triptych.core.store.clock import steady_s
from triptych.core.store.documents import DocumentTable, Key
from triptych.core.store.schema import connect, purge
from triptych.core.store.space import DiskReserve, is_full

Given = ParamSpec("Given")
Result = TypeVar("Result")

_OFF = "off"
_PURGE_S = 1.0
_FULL_RETRY_S = 60.0
_log = logging.getLogger(__name__)


class _NoSpace(sqlite3.OperationalError):
    """The commit would fill the disk."""

    sqlite_errorcode = sqlite3.SQLITE_FULL


class DocumentStore:
    """Documents in a file, or in memory if `place` is `IN_MEMORY`.

    Removed content is erased from the file shortly after. Jumps of `clock` are detected with
    `steady`, a monotonic clock. Raises `ConfigError` for a file that cannot be used.
    """

    def __init__(
        self,
        place: str,
        *,
        max_bytes: int,
        ttl_s: float,
        num_owners: int = 1,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
    ) -> None:
        self._is_full = False
        self._purging: asyncio.TimerHandle | None = None
        self._connection = connect(place)
        self._reserve = DiskReserve(self._connection, place)
        self._table = DocumentTable(
            self._connection,
            max_bytes=max_bytes,
            ttl_s=ttl_s,
            num_owners=num_owners,
            clock=clock,
            steady=steady,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="triptych-store")
        weakref.finalize(self, self._connection.close)  # if `close` is never called

    @classmethod
    def from_options(cls, options: StoreOptions, *, num_owners: int = 1) -> Self | None:
        """The store of `--store` for `num_owners` callers; `None` if it is off."""
        if options.store == _OFF:
            return None
        return cls(
            options.store,
            max_bytes=options.store_mb * 2**20,
            ttl_s=options.store_ttl_s,
            num_owners=num_owners,
        )

    async def call(
        self,
        work: Callable[Concatenate[DocumentTable, Given], Result],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Result:
        """Run `work` on the table in one transaction, rolled back on error; returns its result.

        Raises the errors of `work`, `StoreFull`, and `Unavailable` if the disk fails or is full. On
        a full disk, work that adds no bytes still succeeds.
        """
        loop = asyncio.get_running_loop()
        run = partial(self._transaction, partial(work, self._table, *args, **kwargs))
        try:
            return await loop.run_in_executor(self._thread, run)
        finally:
            self._purge_later(loop)

    def run(self, work: Callable[[DocumentTable], Result]) -> Result:
        """Like `call`, but blocking: for the start of a server."""
        return self._transaction(partial(work, self._table))

    async def content(self, key: Key) -> AsyncGenerator[bytes, None]:
        """The content of a document, piece by piece; ends early if the document is deleted."""
        place = 0
        while (piece := await self.call(DocumentTable.piece, key, place)) is not None:
            yield piece
            place += 1

    async def close(self) -> None:
        """Finish the running transaction and close the file."""
        if self._purging is not None:
            self._purging.cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    def _purge_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._table.has_removed and self._purging is None:
            self._purging = loop.call_later(_PURGE_S, self._begin_purge)

    def _begin_purge(self) -> None:
        self._purging = None
        self._thread.submit(self._purge)

    def _purge(self) -> None:
        self._table.has_removed = False
        try:
            self._reserve.shrink() if self._is_full else purge(self._connection)
        except sqlite3.Error as error:
            self._table.has_removed = True  # try again after the next call
            self._note(error)

    def _transaction(self, work: Callable[[], Result]) -> Result:
        try:
            return self._run_transaction(work)
        except sqlite3.IntegrityError:
            raise  # a duplicate id: a bug of the caller
        except sqlite3.Error as error:
            self._note(error)
            raise _disk_full() if is_full(error) else _failed() from error

    def _run_transaction(self, work: Callable[[], Result]) -> Result:
        """Run a transaction. On a full disk, work that adds no bytes runs in the reserved space."""
        try:
            result = self._attempt(work)
        except sqlite3.OperationalError as error:
            if not is_full(error):
                raise
            is_growing = self._table.num_added_bytes > 0
            with self._reserve.released():
                self._attempt(_nothing)  # removes expired documents
            if is_growing:
                result = self._attempt(work)
            else:
                with self._reserve.released():
                    result = self._attempt(work)
        if self._is_full and self._table.num_added_bytes:
            self._is_full = False
            _log.warning("the disk of the store has space again")
        return result

    def _attempt(self, work: Callable[[], Result]) -> Result:
        self._connection.execute("BEGIN")
        try:
            self._table.expire()
            result = work()
            self._table.settle()
            added = self._table.num_added_bytes
            if added and not self._reserve.has_room(added):
                raise _NoSpace
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return result

    def _note(self, error: sqlite3.Error) -> None:
        """Log a failure of the disk; a full disk only once, until it has space again."""
        if not is_full(error):
            _log.error("the store failed", exc_info=error)
        elif not self._is_full:
            self._is_full = True
            _log.warning("the disk of the store is full: nothing can be stored until it has space")


def _nothing() -> None:
    """The work of a transaction that only removes expired documents."""


def _failed() -> Unavailable:
    return Unavailable("The store cannot be used right now.")


def _disk_full() -> Unavailable:
    return Unavailable(
        "The disk of the store is full: delete what is no longer needed, or try again later.",
        retry_after_s=_FULL_RETRY_S,
    )
