"""Documents by kind, id and owner, within one transaction.

Owns access (an owner finds only its own documents), lifetimes, and eviction: when space is short
the oldest document of the owner that holds the most is removed, and no owner evicts documents of
one that holds less. Each owner has an equal share, which its lasting documents may not exceed, so
that all owners can store. Knows neither threads nor the content of documents.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from triptych.core.errors import InvalidRequest, StoreFull, Unavailable
from triptych.core.store.clock import ExpiryClock, steady_s
from triptych.core.store.schema import OVERHEAD_BYTES

PIECE_BYTES: Final = 2**18
"""The longest piece of a content, which is also the most of it in memory when it is read."""
_SEEN_EVERY_S: Final = 60.0
"""How often the time is stored, for the next process to compare its clock with."""
_CHANGE_BYTES: Final = 256
"""Growth of a document below this, such as a new status, needs no check of disk space."""
_COLUMNS: Final = "kind, id, owner, body, status, is_lasting, created_s, expires_s, content_bytes"


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a document. Callers make ids that are unique and cannot be guessed."""

    kind: str
    id: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document: a short `body`; a long content is stored separately, in pieces.

    It is deleted with its `parent`. Documents of a kind can be listed by `status`. A lasting one
    (`is_lasting`) is never evicted. Times are since the epoch; `expires_s` is infinite for a
    document kept until it is deleted, and `None` for the lifetime of the store.
    """

    key: Key
    body: bytes
    parent: Key | None = None
    status: str = ""
    is_lasting: bool = False
    created_s: float = field(default_factory=time.time)
    expires_s: float | None = None
    content_bytes: int = 0
    """Set by the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list: at most `limit` entries after the entry with the id `after`."""

    limit: int
    after: str = ""
    is_descending: bool = False


class DocumentTable:
    """The documents of `connection`, with `max_bytes` in all, each kept for `ttl_s`.

    All methods are called within a transaction: `expire` is the first call, `settle` the last.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        max_bytes: int,
        ttl_s: float,
        num_owners: int = 1,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = steady_s,
    ) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._num_owners = num_owners
        self._ttl_s = ttl_s
        (self._seen_s,) = connection.execute("SELECT max(at_s) FROM seen").fetchone()
        self._clock = ExpiryClock(clock, steady, ttl_s=ttl_s, seen_s=self._seen_s)
        (last,) = connection.execute("SELECT max(changed) FROM documents").fetchone()
        self._change = last or 0
        """The number of the last transaction that changed a document."""
        self._is_changed = False
        self._writers: set[str] = set()
        """Owners whose documents this transaction changes."""
        self._lasting_writers: set[str] = set()
        """Owners that add to lasting documents in this transaction."""
        self.has_removed = False
        """Whether a document was removed since this was last reset."""
        self.num_added_bytes = 0
        """Bytes that this transaction adds, without subtracting removals."""

    def add(self, *documents: Document) -> bool:
        """Store new documents and restart the lifetimes of their parents.

        If any parent is missing, store nothing and return `False`.
        """
        keys = {document.parent for document in documents if document.parent is not None}
        parents: dict[Key | None, int | None] = {key: self._seq(key) for key in keys}
        if None in parents.values():
            return False
        for document in documents:
            self._insert(document, parents.get(document.parent))
        self.renew(*keys)
        return True

    def replace(self, key: Key, body: bytes, status: str = "") -> bool:
        """Replace the body and status of a document; returns whether it exists."""
        before = self.get(key)
        num_more_bytes = len(body) - len(before.body if before is not None else b"")
        if num_more_bytes > _CHANGE_BYTES:
            self.num_added_bytes += num_more_bytes
        change = "UPDATE documents SET body = ?, status = ?, changed = ? WHERE seq = ?"
        return self._changed(key, change, body, status, self._next(key))

    def renew(self, *keys: Key) -> None:
        """Restart the lifetimes of documents, except those with their own `expires_s`."""
        for key in keys:
            self._changed(
                key,
                "UPDATE documents SET changed = ?, expires_s = iif(is_renewed, ?, expires_s)"
                " WHERE seq = ?",
                *(self._next(key), self._clock.latest_s() + self._ttl_s),
            )

    def get(self, key: Key) -> Document | None:
        """The document, or `None` if it does not exist."""
        return next(iter(self._select("WHERE seq = ?", self._seq(key))), None)

    def delete(self, key: Key) -> bool:
        """Remove a document and its children; returns whether it existed."""
        is_there = self._changed(key, "DELETE FROM documents WHERE seq = ?")
        self.has_removed |= is_there
        return is_there

    def list_page(
        self, owner: str, kind: str, page: Page, parent: Key | None = None
    ) -> list[Document]:
        """Documents in order of creation: the children of `parent`, or those without a parent.

        Raises `InvalidRequest` if `page.after` is not a document of the owner.
        """
        order, beyond = ("DESC", "<") if page.is_descending else ("ASC", ">")
        bound = self._seq(Key(kind, page.after, owner)) if page.after else None
        if page.after and bound is None:
            raise InvalidRequest("after does not name an existing entry.", param="after")
        return self._select(
            f"WHERE owner = ? AND kind = ? AND parent IS ? AND (? OR seq {beyond} ?)"
            f" ORDER BY seq {order} LIMIT ?",
            *(owner, kind, parent and self._seq(parent, default=-1)),
            *(bound is None, bound, page.limit),
        )

    def with_status(self, kind: str, status: str) -> list[Document]:
        """Documents of all owners, for use by the server itself."""
        return self._select("WHERE kind = ? AND status = ? ORDER BY seq", kind, status)

    def append(self, key: Key, data: bytes | bytearray) -> bool:
        """Append to the content of a document; returns whether it exists."""
        seq = self._seq(key)
        if seq is None:
            return False
        self.num_added_bytes += len(data)
        add = (
            "INSERT INTO pieces SELECT ?, coalesce(max(place) + 1, 0), ? FROM pieces"
            " WHERE document = ?"
        )
        for start in range(0, len(data), PIECE_BYTES):
            piece = memoryview(data)[start : start + PIECE_BYTES]
            self._connection.execute(add, (seq, piece, seq))
        grow = "UPDATE documents SET content_bytes = content_bytes + ?, changed = ? WHERE seq = ?"
        lasts = "SELECT is_lasting FROM documents WHERE seq = ?"
        if self._connection.execute(lasts, (seq,)).fetchone()[0]:
            self._lasting_writers.add(key.owner)
        return self._changed(key, grow, len(data), self._next(key))

    def piece(self, key: Key, place: int) -> bytes | None:
        """Piece number `place` of a content; `None` beyond its end."""
        read = "SELECT data FROM pieces WHERE document = ? AND place = ?"
        found = self._connection.execute(read, (self._seq(key), place)).fetchone()
        return None if found is None else found[0]

    def now_s(self) -> float:
        """The current time for expiry."""
        return self._clock.now_s()

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents."""
        (total,) = self._connection.execute("SELECT sum(num_bytes) FROM held").fetchone()
        return total or 0

    def expire(self) -> None:
        """Begin a transaction: reset its bookkeeping and remove expired documents."""
        self._is_changed = False
        self.num_added_bytes = 0
        self._writers.clear()
        self._lasting_writers.clear()
        now_s = self._clock.now_s()
        self._remove("DELETE FROM documents WHERE expires_s <= ?", now_s)
        if self._seen_s is None or abs(now_s - self._seen_s) >= _SEEN_EVERY_S:
            self._connection.execute("DELETE FROM seen")
            self._connection.execute("INSERT INTO seen VALUES (?)", (now_s,))
            self._seen_s = now_s

    def settle(self) -> None:
        """End a transaction: evict the oldest documents until the total fits.

        Raises `StoreFull` if nothing that may be evicted makes enough space (a writer cannot evict
        owners that hold less than it), or if a writer's lasting documents exceed its share. Raises
        `Unavailable` if all writers are within their shares, but documents of other owners take the
        space.
        """
        share = self._share()
        for owner in self._lasting_writers:
            if self._held(owner) > share and self._lasting(owner) > share:
                raise _full(share)
        while self._is_changed and self.num_bytes > self._max_bytes:
            self._drop(self._oldest())

    def _drop(self, seq: int | None) -> None:
        if seq is None:
            share = self._share()
            if all(self._held(owner) <= share for owner in self._writers):
                raise Unavailable("The store is full; try again later.", retry_after_s=60.0)
            raise _full(share)
        self._remove("DELETE FROM documents WHERE seq = ?", seq)

    def _remove(self, statement: str, value: float) -> None:
        self.has_removed |= self._connection.execute(statement, (value,)).rowcount > 0

    def _oldest(self) -> int | None:
        """The document to evict: the oldest of the largest owner, down to the current writers.

        Documents changed in this transaction are never evicted.
        """
        writers, share = set(self._writers), self._share()
        owners = "SELECT owner FROM held WHERE num_bytes > 0 ORDER BY num_bytes DESC"
        oldest = (
            "SELECT seq FROM documents WHERE owner = ? AND parent IS NULL AND NOT is_lasting"
            " AND changed < ? ORDER BY changed LIMIT 1"
        )
        for (owner,) in self._connection.execute(owners).fetchall():
            found = self._connection.execute(oldest, (owner, self._change)).fetchone()
            if found is not None:
                return int(found[0])
            writers.discard(owner)
            if not writers or self._held(owner) <= share:
                break
        return None

    def _share(self) -> int:
        """Bytes that each owner may hold in lasting documents and can always store."""
        count = "SELECT count(*) FROM held WHERE num_bytes > 0"
        (num_holding,) = self._connection.execute(count).fetchone()
        return self._max_bytes // max(self._num_owners, int(num_holding))

    def _held(self, owner: str) -> int:
        found = self._connection.execute("SELECT num_bytes FROM held WHERE owner = ?", (owner,))
        return int((found.fetchone() or (0,))[0])

    def _lasting(self, owner: str) -> int:
        """Bytes of an owner's lasting documents."""
        total = (
            f"SELECT sum(length(body) + content_bytes + {OVERHEAD_BYTES}) FROM documents"  # noqa: S608
            " WHERE owner = ? AND is_lasting"
        )
        return int(self._connection.execute(total, (owner,)).fetchone()[0] or 0)

    def _next(self, key: Key) -> int:
        """The number of this transaction; records the key's owner as a writer."""
        self._writers.add(key.owner)
        if not self._is_changed:
            self._is_changed = True
            self._change += 1
        return self._change

    def _insert(self, document: Document, parent: int | None) -> None:
        self.num_added_bytes += len(document.body) + OVERHEAD_BYTES
        key, expires_s = document.key, document.expires_s
        is_renewed = parent is None and expires_s is None
        if document.is_lasting:
            self._lasting_writers.add(key.owner)
        if is_renewed:
            expires_s = self._clock.latest_s() + self._ttl_s
        elif parent is not None or expires_s == math.inf:
            expires_s = None
        self._connection.execute(
            "INSERT INTO documents (owner, kind, id, parent, status, is_lasting, created_s,"
            " expires_s, is_renewed, changed, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(key.owner, key.kind, key.id, parent, document.status, document.is_lasting),
                *(document.created_s, expires_s, is_renewed, self._next(key), document.body),
            ),
        )

    def _changed(self, key: Key, statement: str, *values: object) -> bool:
        seq = self._seq(key)
        if seq is None:
            return False
        self._next(key)
        self._connection.execute(statement, (*values, seq))
        return True

    def _seq(self, key: Key, default: int | None = None) -> int | None:
        find = "SELECT seq FROM documents WHERE owner = ? AND kind = ? AND id = ?"
        found = self._connection.execute(find, (key.owner, key.kind, key.id)).fetchone()
        return default if found is None else int(found[0])

    def _select(self, where: str, *values: object) -> list[Document]:
        query = f"SELECT {_COLUMNS} FROM documents {where}"  # noqa: S608 - both are ours
        return [_read_document(row) for row in self._connection.execute(query, values)]


def _full(share: int) -> StoreFull:
    return StoreFull(
        f"This does not fit into your share of the store, {share} bytes: delete documents that are"
        " no longer needed, or send less."
    )


def _read_document(row: tuple[Any, ...]) -> Document:
    kind, name, owner, body, status, is_lasting, created_s, expires_s, content_bytes = row
    return Document(
        key=Key(kind, name, owner),
        body=body,
        status=status,
        is_lasting=bool(is_lasting),
        created_s=created_s,
        expires_s=math.inf if expires_s is None else expires_s,
        content_bytes=content_bytes,
    )
