"""Page files: complete or absent, refused when damaged or foreign, found again after a restart."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from support import page_peers
from support.page_peers import FORMAT, KEYS, PAGE_BYTES, content
from triptych.core.errors import ConfigError
from triptych.core.kv.tiers.disk import DiskTier

_WRITER = """
import sys
from pathlib import Path
from support.page_peers import FORMAT, KEYS, content
from triptych.core.kv.tiers.disk import DiskTier

disk = DiskTier(Path(sys.argv[1]), FORMAT, 0)
while True:
    for key in KEYS:
        disk.drop(key)
        disk.write(key, memoryview(content(key)))
    print("all", flush=True)
"""


def write(disk: DiskTier, *keys: bytes) -> None:
    for key in keys:
        disk.write(key, memoryview(content(key)))


def read(disk: DiskTier, key: bytes) -> bytes | None:
    buffer = bytearray(PAGE_BYTES)
    return bytes(buffer) if disk.read(key, memoryview(buffer)) else None


def reopened(disk: DiskTier, folder: Path, num_pages: int = 0) -> DiskTier:
    disk.close()
    return DiskTier(folder, FORMAT, num_pages * disk.page_bytes)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_pages_are_found_after_a_restart(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, FORMAT, 0)
    write(disk, *KEYS[:3])
    disk = reopened(disk, tmp_path)
    assert [read(disk, key) for key in KEYS[:3]] == [content(key) for key in KEYS[:3]]
    assert read(disk, KEYS[3]) is None
    modes = {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    assert modes == {0}, "pages are for their owner alone"


def test_a_smaller_limit_keeps_the_pages_used_last(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, FORMAT, 0)
    write(disk, *KEYS[:4])
    for path in files(tmp_path):
        os.utime(path, ns=(0, 0))
    assert read(disk, KEYS[1]) is not None
    disk = reopened(disk, tmp_path, num_pages=1)
    assert [key in disk.order for key in KEYS[:4]] == [False, True, False, False]
    assert len(files(tmp_path)) == 1


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def rename(path: Path, rng: random.Random) -> None:
    key = rng.choice(KEYS[100:]).hex()
    path.rename(path.parent.parent / key[:2] / key)


@pytest.mark.parametrize("damage", [flip, cut, rename])
def test_damaged_and_foreign_pages_are_refused(
    damage: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    rng = random.Random(3)
    for _ in range(12):
        disk = DiskTier(tmp_path, FORMAT, 0)
        write(disk, *KEYS[:2])
        for path in files(tmp_path):
            if path.name != KEYS[1].hex():
                damage(path, rng)
        if rng.random() < 0.5:
            disk = reopened(disk, tmp_path)
        for key in tuple(disk.order._places):
            assert read(disk, key) == (content(key) if key == KEYS[1] else None)
        assert read(disk, KEYS[1]) == content(KEYS[1])
        disk.drop(KEYS[1])
        for path in files(tmp_path):
            path.unlink()
        disk.close()


@pytest.mark.parametrize("name", ["weights", "layout", "order", "compute"])
def test_pages_of_another_format_are_not_found(name: str, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, FORMAT, 0)
    write(disk, KEYS[0])
    other = DiskTier(tmp_path, msgspec.structs.replace(FORMAT, **{name: "other"}), 0)
    assert KEYS[0] not in other.order
    assert read(other, KEYS[0]) is None
    assert read(disk, KEYS[0]) is not None


def test_a_folder_is_open_once(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, FORMAT, 0)
    with pytest.raises(ConfigError, match="another server"):
        DiskTier(tmp_path, FORMAT, 0)
    reopened(disk, tmp_path)


def test_more_than_the_disk_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="free there"):
        DiskTier(tmp_path, FORMAT, 2**62)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="may write to"):
        DiskTier(tmp_path / "file", FORMAT, 0)


def test_a_killed_writer_loses_at_most_the_page_that_it_wrote(tmp_path: Path) -> None:
    """The writer replaces pages without end and is killed wherever it is."""
    rng = random.Random(0)
    argv = [sys.executable, "-c", _WRITER, str(tmp_path)]
    paths = os.environ | {"PYTHONPATH": str(Path(page_peers.__file__).parents[1])}
    for _ in range(4):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=paths) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "all\n"
            time.sleep(0.02 * rng.random())
            child.kill()
        assert child.returncode == -signal.SIGKILL
        disk = DiskTier(tmp_path, FORMAT, 0)
        found = [read(disk, key) for key in KEYS]
        missing = [key for key, page in zip(KEYS, found, strict=True) if page is None]
        assert all(page in (None, content(key)) for key, page in zip(KEYS, found, strict=True))
        assert len(missing) <= 1, "no page but the one in work is gone"
        assert len(files(tmp_path)) == len(KEYS) - len(missing), "nothing is left over"
        disk.close()


def test_a_folder_that_could_not_be_used_can_be_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "_size", lambda *_: (_ for _ in ()).throw(ConfigError("full")))
        with pytest.raises(ConfigError, match="full"):
            DiskTier(tmp_path, FORMAT, 0)
    DiskTier(tmp_path, FORMAT, 0).close()
