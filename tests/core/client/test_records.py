"""The records of running servers: written, found, and removed when their process is gone."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import pytest

from triptych.core.client import records
from triptych.core.client.records import ServerRecord, recorded, running_servers

URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "triptych" / "servers"


def test_a_server_is_found_while_it_runs(folder: Path) -> None:
    assert running_servers() == []
    with recorded(URL):
        (found,) = running_servers()
        assert (found.url, found.pid) == (URL, os.getpid())
        assert folder.stat().st_mode & 0o077 == 0
    assert running_servers() == []


@pytest.mark.parametrize(
    ("listens", "called"),
    [("http://0.0.0.0:80", "http://127.0.0.1:80"), ("http://[::]:80", "http://[::1]:80")],
)
def test_a_server_on_all_addresses_is_called_on_this_machine(listens: str, called: str) -> None:
    with recorded(listens):
        assert running_servers()[0].url == called


def test_the_latest_server_is_first_and_dead_or_damaged_records_are_removed(folder: Path) -> None:
    folder.mkdir(parents=True)
    gone = 2**22 + 1  # above the largest process id of Linux
    for name, host, pid, started_s in (
        ("a", platform.node(), os.getpid(), 1.0),
        ("b", platform.node(), os.getppid(), 2.0),
        ("c", platform.node(), gone, 3.0),
        ("e", "another-machine", gone, 4.0),
    ):
        record = ServerRecord(url=URL + name, host=host, pid=pid, started_s=started_s)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(record))
    (folder / "d.json").write_text("{")
    assert [record.url[-1] for record in running_servers()] == ["b", "a"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "e.json"]


def test_records_of_other_users_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(URL):
        monkeypatch.setattr(records.os, "getuid", lambda: 12345)
        assert running_servers() == []


def test_a_user_without_a_home_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(records.Path, "home", no_home)
    with recorded(URL):
        assert running_servers() == []


def test_a_server_starts_where_no_record_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with recorded(URL):
        assert running_servers() == []
