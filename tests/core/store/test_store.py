"""The store: who finds what, for how long, what gives way, and what survives."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.http import until
from triptych.core.errors import ConfigError, InvalidRequest, StoreFull, Unavailable
from triptych.core.options.store import StoreOptions
from triptych.core.store import store as store_module
from triptych.core.store.documents import PIECE_BYTES, Document, DocumentTable, Key, Page
from triptych.core.store.schema import OVERHEAD_BYTES
from triptych.core.store.store import DocumentStore


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key(name: str, owner: str = "ann", kind: str = "note") -> Key:
    return Key(kind, name, owner)


def note(name: str, body: bytes = b"x", owner: str = "ann", **fields: Any) -> Document:
    return Document(key=key(name, owner), body=body, **fields)


@asynccontextmanager
async def opened(
    place: str = "memory", max_bytes: int = 2**20, clock: Clock | None = None
) -> AsyncIterator[DocumentStore]:
    clock = clock or Clock()
    store = DocumentStore(place, max_bytes=max_bytes, ttl_s=60.0, clock=clock, steady=clock)
    try:
        yield store
    finally:
        await store.close()


async def ids(store: DocumentStore, owner: str = "ann", **page: Any) -> list[str]:
    page.setdefault("limit", 100)
    found = await store.call(DocumentTable.list_page, owner, "note", Page(**page))
    return [document.key.id for document in found]


async def test_only_its_owner_finds_a_document() -> None:
    async with opened() as store:
        assert await store.call(DocumentTable.add, note("a", b"mine"), note("a", owner="bob"))
        found = await store.call(DocumentTable.get, key("a"))
        assert found is not None
        assert found.body == b"mine"
        stranger = key("a", "eve")
        assert await store.call(DocumentTable.get, stranger) is None
        assert not await store.call(DocumentTable.delete, stranger)
        assert not await store.call(DocumentTable.replace, stranger, b"y")
        assert not await store.call(DocumentTable.append, stranger, b"y")
        assert await ids(store, "eve") == []
        assert await store.call(DocumentTable.get, key("a", kind="letter")) is None


async def test_a_document_is_replaced_only_while_it_is_there() -> None:
    async with opened() as store:
        await store.call(DocumentTable.add, note("a", status="open"))
        assert await store.call(DocumentTable.replace, key("a"), b"longer", "done")
        assert not await store.call(DocumentTable.with_status, "note", "open")
        (found,) = await store.call(DocumentTable.with_status, "note", "done")
        assert found.body == b"longer"
        assert await store.call(DocumentTable.delete, key("a"))
        assert not await store.call(DocumentTable.replace, key("a"), b"again")


async def test_pages_of_a_list() -> None:
    async with opened() as store:
        await store.call(DocumentTable.add, *(note(name) for name in "abcde"))
        assert await ids(store, limit=2) == ["a", "b"]
        assert await ids(store, limit=2, after="b") == ["c", "d"]
        assert await ids(store, limit=3, is_descending=True) == ["e", "d", "c"]
        assert await ids(store, limit=3, after="b", is_descending=True) == ["a"]
        with pytest.raises(InvalidRequest):
            await ids(store, after="z")


async def test_children_go_with_their_parent() -> None:
    async with opened() as store:
        child = note("child", parent=key("a"))
        assert not await store.call(DocumentTable.add, child)
        await store.call(DocumentTable.add, note("a"), note("b"))
        await store.call(DocumentTable.add, child)
        listed = await store.call(DocumentTable.list_page, "ann", "note", Page(limit=9), key("a"))
        assert [document.key.id for document in listed] == ["child"]
        assert await ids(store) == ["a", "b"]  # a child is no entry of the whole list
        await store.call(DocumentTable.delete, key("a"))
        assert await store.call(DocumentTable.get, key("child")) is None
        assert await store.call(held) == OVERHEAD_BYTES + 1


def held(table: DocumentTable) -> int:
    return table.num_bytes


async def test_lifetimes() -> None:
    clock = Clock()
    async with opened(clock=clock) as store:
        lasting = note("ever", expires_s=math.inf)
        await store.call(
            DocumentTable.add, note("a"), note("b"), note("own", expires_s=1070.0), lasting
        )
        clock.now_s += 40
        await store.call(DocumentTable.renew, key("a"), key("own"))
        clock.now_s += 29
        assert await ids(store) == ["a", "own", "ever"]
        await store.call(DocumentTable.add, note("child", parent=key("a")))  # renews, too
        clock.now_s += 50
        assert await ids(store) == ["a", "ever"]
        clock.now_s += 50
        assert await store.call(DocumentTable.get, key("child")) is None
        found = await store.call(DocumentTable.get, key("ever"))
        assert found is not None
        assert found.expires_s == math.inf


async def add(store: DocumentStore, name: str, num_bytes: int = 1000, **fields: Any) -> None:
    body = bytes(num_bytes - OVERHEAD_BYTES)
    await store.call(DocumentTable.add, note(name, body, **fields))


async def test_the_oldest_of_who_holds_the_most_give_way() -> None:
    async with opened(max_bytes=5000) as store:
        await add(store, "modest", owner="bob")
        for name in "abcd":
            await add(store, name)
        await add(store, "e", owner="bob")
        assert await ids(store) == ["b", "c", "d"]
        await store.call(DocumentTable.renew, key("b"))
        await add(store, "f")
        assert await ids(store) == ["b", "d", "f"]
        assert await ids(store, "bob") == ["modest", "e"]


async def test_nobody_pushes_out_who_holds_less() -> None:
    async with opened(max_bytes=20_000) as store:
        for number in range(5):
            await add(store, f"{number}")
        await add(store, "own", owner="eve")
        await store.call(DocumentTable.add, note("big", b"", "eve"))
        await store.call(DocumentTable.append, key("big", "eve"), bytes(14_400))
        with pytest.raises(StoreFull):
            await store.call(DocumentTable.append, key("big", "eve"), bytes(1000))
        assert await ids(store) == ["0", "1", "2", "3", "4"]
        assert await ids(store, "eve") == ["big"]
        await add(store, "more", 4000)  # of one who holds less: the others' oldest gives way
        assert await ids(store, "eve") == []


async def test_what_is_removed_is_not_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[str]:
        files = tmp_path.iterdir()
        return [file.name for file in files if b"secret" in file.read_bytes()]

    path = str(tmp_path / "kept.db")
    monkeypatch.setattr(store_module, "_PURGE_S", 0.01)
    store = DocumentStore(path, max_bytes=2**20, ttl_s=60.0)
    await store.call(DocumentTable.add, note("a", b"secret" * 1000), note("b"))
    assert found()
    await store.call(DocumentTable.delete, key("a"))
    await asyncio.to_thread(until, lambda: not found())
    assert await ids(store) == ["b"]
    await store.close()


async def test_what_cannot_fit_is_refused_and_nothing_is_lost() -> None:
    async with opened(max_bytes=5000) as store:
        await add(store, "file", 3000, is_lasting=True)
        await add(store, "a")
        with pytest.raises(StoreFull):
            await add(store, "b", 3000)
        assert await ids(store) == ["file", "a"]
        with pytest.raises(StoreFull):
            await store.call(DocumentTable.append, key("a"), bytes(2000))
        assert await store.call(held) == 4000
        await store.call(DocumentTable.delete, key("file"))
        await add(store, "b", 3000)
        assert await ids(store) == ["a", "b"]


async def test_content_comes_in_pieces(tmp_path: Path) -> None:
    pieces = [b"1" * PIECE_BYTES, b"2" * PIECE_BYTES, b"3"]
    path = str(tmp_path / "kept.db")
    async with opened(path) as store:
        await store.call(DocumentTable.add, note("a"), note("b"))
        assert await store.call(DocumentTable.append, key("a"), bytearray(pieces[0] + pieces[1]))
        assert await store.call(DocumentTable.append, key("a"), pieces[2])
        assert await store.call(held) == sum(map(len, pieces)) + 2 * (OVERHEAD_BYTES + 1)
    async with opened(path) as store:
        assert [piece async for piece in store.content(key("a"))] == pieces
        assert [piece async for piece in store.content(key("b"))] == []
        found = await store.call(DocumentTable.get, key("a"))
        assert found is not None
        assert found.content_bytes == sum(map(len, pieces))
        await store.call(DocumentTable.delete, key("a"))
        assert await store.call(held) == OVERHEAD_BYTES + 1
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM pieces").fetchone() == (0,)
    connection.close()


async def test_an_error_leaves_nothing() -> None:
    def fail(table: DocumentTable) -> None:
        table.add(note("a"))
        raise KeyError

    async with opened() as store:
        with pytest.raises(KeyError):
            await store.call(fail)
        assert await ids(store) == []
        with pytest.raises(sqlite3.IntegrityError):
            await store.call(DocumentTable.add, note("a"), note("a"))
        assert await store.call(held) == 0


_WRITER = """
import asyncio, sys
from triptych.core.store import store as store_module
from triptych.core.store.documents import Document, DocumentTable, Key
from triptych.core.store.store import DocumentStore

async def main():
    store = DocumentStore(sys.argv[1], max_bytes=2**30, ttl_s=60.0)
    for n in range(100_000):
        keys = [Key("note", f"{n}{half}", "ann") for half in "ab"]
        documents = [Document(key=key, body=bytes(500)) for key in keys]
        await store.call(DocumentTable.add, *documents)
        print(n, flush=True)

asyncio.run(main())
"""


def write_and_die(path: str) -> int:
    """How many documents another process kept for sure before it was killed."""
    command = [sys.executable, "-c", _WRITER, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 50:
            pass
        writer.send_signal(signal.SIGKILL)
        return 2 * max([50, *(int(line) for line in writer.stdout if line.endswith("\n"))])


async def test_a_killed_process_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "kept.db")
    num_kept = await asyncio.to_thread(write_and_die, path)
    store = DocumentStore(path, max_bytes=2**30, ttl_s=1e9)
    found = await ids(store, limit=10**6)
    await store.close()
    assert len(found) >= num_kept
    assert len(found) % 2 == 0  # each transaction wholly


async def test_a_file_is_its_owner_s_and_has_one_user(tmp_path: Path) -> None:
    path = tmp_path / "below" / "kept.db"
    async with opened(str(path)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(ConfigError, match="locked"):
            DocumentStore(str(path), max_bytes=1, ttl_s=1.0)


@pytest.mark.parametrize("content", [b"no database at all" * 100, "other", "version"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "kept.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE t (a)")
        if content == "version":
            connection.execute(f"PRAGMA application_id = {0x54525059}")
            connection.execute("PRAGMA user_version = 99")
        connection.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="--store"):
        DocumentStore(str(path), max_bytes=1, ttl_s=1.0)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError):
        DocumentStore(str(tmp_path), max_bytes=1, ttl_s=1.0)


async def test_a_disk_that_fails_is_no_fault_of_the_caller() -> None:
    def fail(table: DocumentTable) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    async with opened() as store:
        with pytest.raises(Unavailable) as raised:
            await store.call(fail)
        assert "disk" not in raised.value.message
        await add(store, "a")  # the next one may work


async def test_no_work_is_done_on_the_loop() -> None:
    def work(table: DocumentTable) -> threading.Thread:
        return threading.current_thread()

    async with opened() as store:
        found = set(await asyncio.gather(*(store.call(work) for _ in range(20))))
        assert len(found) == 1
        assert threading.current_thread() not in found


async def test_off_is_no_store() -> None:
    assert DocumentStore.from_options(StoreOptions(store="off")) is None
    store = DocumentStore.from_options(StoreOptions())
    assert store is not None
    await store.close()


async def test_what_lasts_stays_within_a_share() -> None:
    store = DocumentStore("memory", max_bytes=20_000, ttl_s=60.0, num_owners=2)
    await add(store, "earlier", 3000, owner="bob")
    for number in range(10):
        await add(store, f"{number}", is_lasting=True)
    with pytest.raises(StoreFull, match="share of the store, 10000 bytes"):
        await add(store, "one too many", is_lasting=True)
    await add(store, "free room", 6000)  # what gives way may take what others leave
    await add(store, "conversation", 6000, owner="bob")
    assert sorted(await ids(store, "bob")) == ["conversation", "earlier"]
    assert "free room" not in await ids(store)
    await store.close()


async def test_who_is_not_to_blame_is_asked_to_come_again() -> None:
    store = DocumentStore("memory", max_bytes=20_000, ttl_s=60.0)
    await add(store, "alone", 19_000, is_lasting=True)  # before there was a second key
    with pytest.raises(Unavailable):
        await add(store, "modest", 2000, owner="bob")
    await store.call(DocumentTable.delete, key("alone"))
    await add(store, "modest", 2000, owner="bob")
    await store.close()


@pytest.mark.parametrize("seed", range(20))
async def test_nobody_loses_what_fits_its_share(seed: int) -> None:
    """Whatever two owners write, a third keeps all that is within its share."""
    rng = random.Random(seed)
    store = DocumentStore("memory", max_bytes=60_000, ttl_s=60.0, num_owners=3)
    kept: list[str] = []
    for number in range(120):
        owner = rng.choice(("ann", "eve", "bob"))
        is_lasting = owner != "bob" and rng.random() < 0.5
        if owner == "bob" and len(kept) == 10:
            continue
        size = 2000 if owner == "bob" else rng.randrange(600, 9000)
        with contextlib.nullcontext() if owner == "bob" else contextlib.suppress(StoreFull):
            await add(store, f"{number}", size, owner=owner, is_lasting=is_lasting)
            kept += [f"{number}"] if owner == "bob" else []
        assert await ids(store, "bob") == kept
    await store.close()
