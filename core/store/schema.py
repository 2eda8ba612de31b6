"""The SQLite file of a store: its tables, its version, and how it is opened.

Owns SQLite's settings. Transactions are atomic even if the process is killed; after a power cut the
last ones may be missing. Knows no kind of document.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from triptych.core.errors import ConfigError

IN_MEMORY: Final = "memory"
OVERHEAD_BYTES: Final = 512
"""Bytes counted per document in addition to its content, about the size of its row and indexes."""
_APPLICATION_ID: Final = 0x54525059
_VERSION: Final = 1
_INCREMENTAL: Final = 2
_SEEN: Final = "CREATE TABLE IF NOT EXISTS seen (at_s REAL NOT NULL)"
"""The last accepted time. Older versions ignore the table."""

_TABLES: Final = f"""
CREATE TABLE documents (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  owner TEXT NOT NULL,
  kind TEXT NOT NULL,
  id TEXT NOT NULL,
  parent INTEGER REFERENCES documents (seq) ON DELETE CASCADE,
  status TEXT NOT NULL,
  is_lasting INTEGER NOT NULL,
  created_s REAL NOT NULL,
  expires_s REAL,
  is_renewed INTEGER NOT NULL,
  changed INTEGER NOT NULL,
  body BLOB NOT NULL,
  content_bytes INTEGER NOT NULL DEFAULT 0,
  UNIQUE (owner, kind, id)
);
CREATE INDEX by_place ON documents (owner, kind, parent, seq);
CREATE INDEX by_parent ON documents (parent) WHERE parent IS NOT NULL;
CREATE INDEX by_change ON documents (owner, changed) WHERE parent IS NULL AND NOT is_lasting;
CREATE INDEX by_expiry ON documents (expires_s) WHERE expires_s IS NOT NULL;
CREATE INDEX by_status ON documents (kind, status) WHERE status != '';
CREATE TABLE pieces (
  document INTEGER NOT NULL REFERENCES documents (seq) ON DELETE CASCADE,
  place INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (document, place)
);
CREATE TABLE held (owner TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL);
CREATE TRIGGER added AFTER INSERT ON documents BEGIN
  INSERT INTO held VALUES (new.owner, length(new.body) + {OVERHEAD_BYTES})
  ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER changed AFTER UPDATE OF body, content_bytes ON documents BEGIN
  UPDATE held SET num_bytes = num_bytes + length(new.body) - length(old.body)
    + new.content_bytes - old.content_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER removed AFTER DELETE ON documents BEGIN
  UPDATE held SET num_bytes = num_bytes - length(old.body) - old.content_bytes - {OVERHEAD_BYTES}
    WHERE owner = old.owner;
END;
"""  # noqa: S608 - a number of ours


def connect(place: str) -> sqlite3.Connection:
    """The database in the file `place`, created if absent, or `IN_MEMORY`.

    It is locked for this process. Raises `ConfigError` if the file is in use or not a store.
    """
    if place == IN_MEMORY:
        return _prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    path = Path(place).expanduser()
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        os.close(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        )  # closed to other users
        file = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        return _prepared(file)
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--store {place}: cannot be used as a store ({reason}).") from error


def purge(connection: sqlite3.Connection) -> None:
    """Erase removed content from the files, where the write-ahead log may still hold it."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def can_shrink(connection: sqlite3.Connection) -> bool:
    """Whether the file supports `release_pages`."""
    return _number(connection, "auto_vacuum") == _INCREMENTAL


def num_bytes(connection: sqlite3.Connection) -> int:
    """The size of the file after the write-ahead log has been applied."""
    return _number(connection, "page_count") * _number(connection, "page_size")


def num_free_pages(connection: sqlite3.Connection) -> int:
    """Unused pages of the file."""
    return _number(connection, "freelist_count")


def release_pages(connection: sqlite3.Connection, num_pages: int) -> None:
    """Truncate the file by at most `num_pages` free pages; later pages move into them."""
    # A cursor would do a single step, which is one page.
    connection.executescript(f"PRAGMA incremental_vacuum({num_pages})")


def _number(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _prepared(connection: sqlite3.Connection) -> sqlite3.Connection:
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        if _num_tables(connection) == 0:
            connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        connection.execute("BEGIN IMMEDIATE")
        _make_tables(connection)
        connection.execute(_SEEN)
        connection.execute("COMMIT")
        with suppress(sqlite3.OperationalError):  # optional: the file works without it
            _let_shrink(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA journal_size_limit = 0")
    except BaseException:
        connection.close()
        raise
    return connection


def _let_shrink(connection: sqlite3.Connection) -> None:
    """Rewrite a file from an earlier version, so that it can release free pages."""
    if not can_shrink(connection):
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        connection.execute("VACUUM")


def _num_tables(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0])


def _make_tables(connection: sqlite3.Connection) -> None:
    found = [_number(connection, name) for name in ("application_id", "user_version")]
    if _num_tables(connection) == 0:
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
        for statement in _statements():
            connection.execute(statement)
    elif found[0] != _APPLICATION_ID:
        raise sqlite3.DatabaseError("it is another program's database")
    elif found[1] != _VERSION:
        raise sqlite3.DatabaseError(
            f"it has version {found[1]}, but this program needs version {_VERSION}: move it away"
        )


def _statements() -> list[str]:
    """The single statements of `_TABLES`: a script would end the transaction."""
    statements, part = [], ""
    for line in _TABLES.strip().splitlines():
        part += line + "\n"
        if sqlite3.complete_statement(part):
            statements.append(part)
            part = ""
    return statements
