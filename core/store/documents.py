"""Documents by kind, id and owner, as one transaction sees them.

Owns who finds what (nobody another's), how long it is kept, and what gives way where there is no
room: the oldest of the owner that holds the most, and no one's for one that holds more. Each owner
has an equal share: what lasts stays within it, so that there is room for everybody's. Knows neither
threads nor what is in a document.
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
"""The longest piece of a content: what is in memory at once of one that is read."""
_SEEN_EVERY_S: Final = 60.0
"""How often the time is written down, for the next process to compare its clock with."""
_CHANGE_BYTES: Final = 256
"""A document that grows by less, as by another status, needs no room on the disk."""
_COLUMNS: Final = "kind, id, owner, body, status, is_lasting, created_s, expires_s, content_bytes"


@dataclass(frozen=True, slots=True)
class Key:
    """What a document is found by. Ids are made where they cannot be guessed or come twice."""

    kind: str
    id: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A short `body`; a long content is kept beside it, in pieces.

    It goes with its `parent`. Those of a kind with one `status` are found together. One that
    `is_lasting` does not give way to others. Times are since the epoch; `expires_s` is infinite for
    one that is kept until it is deleted, and `None` for the lifetime of the store.
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
    """At most `limit` entries of a list, those that follow the entry with the id `after`."""

    limit: int
    after: str = ""
    is_descending: bool = False


class DocumentTable:
    """The documents of `connection`, of `max_bytes` in all, each kept for `ttl_s`.

    Its methods are called within a transaction, which `expire` begins and `settle` ends.
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
        """Numbers the transactions that change something."""
        self._is_changed = False
        self._writers: set[str] = set()
        """Whose documents this transaction changes."""
        self._keepers: set[str] = set()
        """Who of them adds to what lasts."""
        self.has_removed = False
        """Whether something went since this was last reset."""
        self.num_added_bytes = 0
        """What this transaction adds, whatever it removes."""

    def add(self, *documents: Document) -> bool:
        """Keep new documents. Nothing is kept where the parent of one is not there: `False`.

        The lifetime of a parent begins anew.
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
        """Change a document; whether it is there."""
        before = self.get(key)
        num_more_bytes = len(body) - len(before.body if before is not None else b"")
        if num_more_bytes > _CHANGE_BYTES:
            self.num_added_bytes += num_more_bytes
        change = "UPDATE documents SET body = ?, status = ?, changed = ? WHERE seq = ?"
        return self._changed(key, change, body, status, self._next(key))

    def renew(self, *keys: Key) -> None:
        """Let the lifetimes of documents begin anew, unless they have one of their own."""
        for key in keys:
            self._changed(
                key,
                "UPDATE documents SET changed = ?, expires_s = iif(is_renewed, ?, expires_s)"
                " WHERE seq = ?",
                *(self._next(key), self._clock.latest_s() + self._ttl_s),
            )

    def get(self, key: Key) -> Document | None:
        """The document, if it is there."""
        return next(iter(self._select("WHERE seq = ?", self._seq(key))), None)

    def delete(self, key: Key) -> bool:
        """Remove a document and those whose parent it is; whether it was there."""
        is_there = self._changed(key, "DELETE FROM documents WHERE seq = ?")
        self.has_removed |= is_there
        return is_there

    def listed(
        self, owner: str, kind: str, page: Page, parent: Key | None = None
    ) -> list[Document]:
        """Documents in the order they came, of a parent or of none.

        Raises `InvalidRequest` where `page.after` is none of the owner's.
        """
        order, beyond = ("DESC", "<") if page.is_descending else ("ASC", ">")
        bound = self._seq(Key(kind, page.after, owner)) if page.after else None
        if page.after and bound is None:
            raise InvalidRequest("after names nothing that is there.", param="after")
        return self._select(
            f"WHERE owner = ? AND kind = ? AND parent IS ? AND (? OR seq {beyond} ?)"
            f" ORDER BY seq {order} LIMIT ?",
            *(owner, kind, parent and self._seq(parent, default=-1)),
            *(bound is None, bound, page.limit),
        )

    def with_status(self, kind: str, status: str) -> list[Document]:
        """Documents of all owners: for the server itself."""
        return self._select("WHERE kind = ? AND status = ? ORDER BY seq", kind, status)

    def append(self, key: Key, data: bytes | bytearray) -> bool:
        """Add to the content of a document; whether it is there."""
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
            self._keepers.add(key.owner)
        return self._changed(key, grow, len(data), self._next(key))

    def piece(self, key: Key, place: int) -> bytes | None:
        """A piece of a content; `None` beyond its end."""
        read = "SELECT data FROM pieces WHERE document = ? AND place = ?"
        found = self._connection.execute(read, (self._seq(key), place)).fetchone()
        return None if found is None else found[0]

    def now_s(self) -> float:
        """The time by which things are over."""
        return self._clock.now_s()

    @property
    def num_bytes(self) -> int:
        """What all documents take."""
        (total,) = self._connection.execute("SELECT sum(num_bytes) FROM held").fetchone()
        return total or 0

    def expire(self) -> None:
        """Forget what is over its time."""
        self._is_changed = False
        self.num_added_bytes = 0
        self._writers.clear()
        self._keepers.clear()
        now_s = self._clock.now_s()
        self._remove("DELETE FROM documents WHERE expires_s <= ?", now_s)
        if self._seen_s is None or abs(now_s - self._seen_s) >= _SEEN_EVERY_S:
            self._connection.execute("DELETE FROM seen")
            self._connection.execute("INSERT INTO seen VALUES (?)", (now_s,))
            self._seen_s = now_s

    def settle(self) -> None:
        """Forget the oldest as long as there is no room.

        Raises `StoreFull` where what stays and what was changed just now do not fit, and for one
        who writes and holds more than all others that can give way, or whose lasting documents
        take more than a share: no owner pushes out one that holds less. Raises `Unavailable` for
        one within its share, where what others keep leaves no room.
        """
        share = self._share()
        for owner in self._keepers:
            if self._held(owner) > share and self._lasting(owner) > share:
                raise _full(share)
        while self._is_changed and self.num_bytes > self._max_bytes:
            self._drop(self._oldest())

    def _drop(self, seq: int | None) -> None:
        if seq is None:
            share = self._share()
            if all(self._held(owner) <= share for owner in self._writers):
                raise Unavailable(
                    "The store is full of what others keep; try again later.", retry_after_s=60.0
                )
            raise _full(share)
        self._remove("DELETE FROM documents WHERE seq = ?", seq)

    def _remove(self, statement: str, value: float) -> None:
        self.has_removed |= self._connection.execute(statement, (value,)).rowcount > 0

    def _oldest(self) -> int | None:
        """What gives way first, of whoever holds the most, down to those who write now.

        Nothing that was changed just now does.
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
        """What one owner may keep for good, and is never refused."""
        count = "SELECT count(*) FROM held WHERE num_bytes > 0"
        (num_holding,) = self._connection.execute(count).fetchone()
        return self._max_bytes // max(self._num_owners, int(num_holding))

    def _held(self, owner: str) -> int:
        found = self._connection.execute("SELECT num_bytes FROM held WHERE owner = ?", (owner,))
        return int((found.fetchone() or (0,))[0])

    def _lasting(self, owner: str) -> int:
        """What an owner's documents take that do not give way."""
        total = (
            f"SELECT sum(length(body) + content_bytes + {OVERHEAD_BYTES}) FROM documents"  # noqa: S608
            " WHERE owner = ? AND is_lasting"
        )
        return int(self._connection.execute(total, (owner,)).fetchone()[0] or 0)

    def _next(self, key: Key) -> int:
        """The number of this transaction, which changes something of the owner's."""
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
            self._keepers.add(key.owner)
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
        return [_document(row) for row in self._connection.execute(query, values)]


def _full(share: int) -> StoreFull:
    return StoreFull(
        f"Your share of the store is {share} bytes, and this does not fit into what is left of"
        " it: delete what is not needed any more, or send less."
    )


def _document(row: tuple[Any, ...]) -> Document:
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
