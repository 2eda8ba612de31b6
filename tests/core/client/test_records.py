"""The records of running servers: written, found, and removed when their server has ended."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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


def write(folder: Path, name: str, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"url": URL + name, "host": platform.node(), "pid": os.getpid(), "started_s": 1.0}
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(ServerRecord(**(given | fields))))
    return path


def test_the_latest_server_is_first_and_ended_or_damaged_records_are_removed(folder: Path) -> None:
    with ExitStack() as stack:
        for name, started_s in (("a", 1.0), ("b", 2.0)):
            file = stack.enter_context(write(folder, name, started_s=started_s).open("rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        write(folder, "c", started_s=3.0)
        write(folder, "e", host="another-machine", started_s=4.0)
        (folder / "d.json").write_text("{")
        assert [record.url[-1] for record in running_servers()] == ["b", "a"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json", "e.json"]


def test_a_killed_server_is_gone_though_its_process_id_lives(folder: Path) -> None:
    program = (
        "import sys\n"
        "from triptych.core.client.records import recorded\n"
        f"with recorded({URL!r}):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        (found,) = running_servers()
        assert found.pid == server.pid
        server.kill()
    (left,) = folder.iterdir()
    left.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, pid=os.getpid())))
    assert running_servers() == []
    assert list(folder.iterdir()) == []


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
