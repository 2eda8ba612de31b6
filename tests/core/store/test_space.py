"""A store on a full disk: room can be made through it, and it takes new documents afterwards.

The disk is a small one of its own, in a namespace of its own; skipped where none can be made.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.core.store.documents import Document, DocumentTable, Key
from triptych.core.store.schema import can_shrink
from triptych.core.store.space import RESERVE_BYTES
from triptych.core.store.store import DocumentStore

_OWN_DISK = ("unshare", "--user", "--map-root-user", "--mount")
FULL = """
import asyncio, json, logging, math, os, sys
from pathlib import Path
from triptych.core.errors import Unavailable
from triptych.core.store.documents import Document, DocumentTable, Key
from triptych.core.store import store as store_module
from triptych.core.store.store import DocumentStore

store_module._PURGE_S = 0.01
folder, num_bytes, by_others = sys.argv[1], int(sys.argv[2]), sys.argv[3]
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append([record.getMessage(), record.exc_info is not None])
logging.getLogger("triptych").addHandler(handler)

def key(name): return Key("file", name, "ann")

def keep(table, name, data):
    table.add(Document(key=key(name), body=b"x", is_lasting=True, expires_s=math.inf))
    table.append(key(name), data)

def data(): return b"needle" * (num_bytes // 6)

async def tried(work, *args):
    try:
        return await store.call(work, *args)
    except Unavailable as error:
        return f"{error.status} {error.retry_after_s} {error.message}"

async def main():
    global store
    store = DocumentStore(folder + "/kept.db", max_bytes=2**30, ttl_s=1000.0)
    names, found = [], {}
    await store.call(DocumentTable.add, Document(key=key("first"), body=b"y"))
    others = Path(folder, "others").open("wb")
    disk = os.statvfs(folder)
    if by_others == "before":
        others.write(bytes(disk.f_bavail * disk.f_frsize - 1_000_000))
        others.flush()
    while (result := await tried(keep, str(len(names)), data())) is None:
        names.append(str(len(names)))
        if by_others == "after":  # what is still in the log can go nowhere
            disk = os.statvfs(folder)
            others.write(bytes(disk.f_bavail * disk.f_frsize))
            others.flush()
    found["refused"] = result
    for name in ("again", "and again"):
        if await tried(keep, name, b"needle" * 20) is None:
            names.append(name)
    first = await tried(DocumentTable.get, key("first"))
    found["read"] = first.body == b"y"
    found["renewed"] = await tried(DocumentTable.renew, key("first"))
    found["finished"] = [
        await tried(DocumentTable.replace, key("first"), body, "done") for body in (b"y" * 50, b"")
    ]
    found["deleted"] = [await tried(DocumentTable.delete, key(name)) for name in names]
    await asyncio.sleep(0.2)
    files = [file for file in Path(folder).iterdir() if file.name != "others"]
    found["left"] = [file.name for file in files if b"needle" in file.read_bytes()]
    found["kept"] = await tried(keep, "later", os.urandom(num_bytes // 2))
    found["lines"] = lines
    found["files"] = sorted(os.listdir(folder))
    found["integrity"] = store._connection.execute("PRAGMA integrity_check").fetchone()[0]
    await store.close()
    print(json.dumps(found))

asyncio.run(main())
"""


def on_small_disk(folder: Path, mib: int, *args: object) -> Any:
    mount = f"mount -t tmpfs -o size={mib}m tmpfs {folder}"
    attempt = [*_OWN_DISK, "sh", "-c", mount]
    if not shutil.which("unshare") or subprocess.run(attempt, check=False).returncode:
        pytest.skip("no disk of one's own can be made here")
    run = f'{mount} && exec "$@"'
    done = subprocess.run(
        [*_OWN_DISK, "sh", "-c", run, "sh", sys.executable, "-c", FULL, folder, *map(str, args)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("mib", "num_bytes", "by_others"),
    [
        *((3, 400_000, ""), (3, 30_000, ""), (16, 3_000_000, "")),
        *((16, 200_000, "before"), (16, 3_000_000, "after"), (16, 400_000, "after")),
    ],
)
def test_a_full_disk_lets_things_be_deleted(
    tmp_path: Path, mib: int, num_bytes: int, by_others: str
) -> None:
    found = on_small_disk(tmp_path, mib, num_bytes, by_others)
    assert found["refused"].startswith("503 60.0 The disk of the store is full: delete")
    assert found["read"]
    assert found["renewed"] is None
    assert found["finished"] == [True, True]  # a status needs no more room
    assert found["deleted"] == [True] * len(found["deleted"])
    assert found["left"] == []  # what was removed is not in the files
    assert found["kept"] is None
    ends = [line.rpartition(":")[0] or line for line, _ in found["lines"]]
    full, room = "the disk of the store is full", "the disk of the store has space again"
    assert ends == [full, room] * (len(ends) // 2)
    assert 2 <= len(ends) <= 6  # not one for each request
    assert not any(has_traceback for _, has_traceback in found["lines"])
    assert "kept.db.reserve" in found["files"]
    assert found["integrity"] == "ok"


async def test_a_store_of_an_earlier_version_can_give_pages_back(tmp_path: Path) -> None:
    place = tmp_path / "kept.db"
    store = DocumentStore(str(place), max_bytes=2**24, ttl_s=1000.0)
    await store.call(DocumentTable.add, Document(key=Key("note", "a", "ann"), body=b"x" * 10**6))
    await store.close()
    earlier = sqlite3.connect(place, isolation_level=None)
    earlier.execute("DROP TABLE seen")
    earlier.execute("PRAGMA journal_mode = DELETE")
    earlier.execute("PRAGMA auto_vacuum = 0")
    earlier.execute("VACUUM")
    assert not can_shrink(earlier)
    earlier.close()
    store = DocumentStore(str(place), max_bytes=2**24, ttl_s=1000.0)
    assert can_shrink(store._connection)
    found = await store.call(DocumentTable.get, Key("note", "a", "ann"))
    assert found is not None
    assert found.body == b"x" * 10**6
    await store.close()


async def test_the_reserve_is_taken_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    reserve = tmp_path / "kept.db.reserve"
    for _ in range(2):
        store = DocumentStore(str(tmp_path / "kept.db"), max_bytes=2**20, ttl_s=1000.0)
        about = reserve.stat()
        assert about.st_size == RESERVE_BYTES
        assert about.st_mode & 0o777 == 0o600
        await store.close()
    assert reserve.stat().st_mtime_ns == about.st_mtime_ns
