"""`--crash-dump-folder`: the requests that are kept, and the files of a crash."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from support.http import FakeEngine, chat, in_process, make_app
from triptych.core.errors import ConfigError
from triptych.core.http import crash_dump


async def _dumped(tmp_path: Path, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    folder = tmp_path / "dumps"
    options = {"crash_dump_folder": str(folder), "api_key": ("hidden-key",)}
    app = make_app(tmp_path, FakeEngine(), **options)
    async with in_process(app, authorization="Bearer hidden-key") as client:
        for body in bodies:
            await client.post("/v1/chat/completions", json=body)
    app.state.kept_requests.dump("the engine was killed").join()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "hidden" not in file.read_text()
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_a_dump_has_what_is_needed_to_send_requests_again(tmp_path: Path) -> None:
    body = chat("a prompt", max_tokens=3)
    wrong = chat(seed=2**70, token="hidden")
    head, line, refused = await _dumped(tmp_path, body, wrong)
    assert head["reason"] == "the engine was killed"
    assert head["options"]["api_key"] == ["***"]
    assert line["body"] == body
    assert (line["route"], line["status"]) == ("/v1/chat/completions", 200)
    assert (refused["status"], refused["body"]["seed"]) == (400, 2**70)


async def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_dump, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(crash_dump, "MAX_BYTES", 1500)
    bodies = [chat(f"{index} " + "x" * 400) for index in range(4)]
    _, *lines = await _dumped(tmp_path, *bodies, chat("x" * 2000))
    assert [line["body"] for line in lines] == [*bodies[1:], None]
    assert lines[-1]["num_bytes"] > 2000


async def test_the_folder_keeps_so_many_dumps(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    app = make_app(tmp_path, FakeEngine(), crash_dump_folder=str(folder))
    app.state.kept_requests.dump("before the first request")
    assert not list(folder.iterdir())
    async with in_process(app) as client:
        await client.post("/v1/chat/completions", json=chat())
    for _ in range(crash_dump.MAX_DUMPS + 3):
        app.state.kept_requests.dump("x").join()
    assert len(list(folder.iterdir())) == crash_dump.MAX_DUMPS


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it"):
        crash_dump.KeptRequests(str(tmp_path), {})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--crash-dump-folder"):
        crash_dump.KeptRequests(str(tmp_path / "file"), {})


async def test_a_dump_keeps_no_loop_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(tmp_path, FakeEngine(), crash_dump_folder=str(tmp_path / "dumps"))
    async with in_process(app) as client:
        await client.post("/v1/chat/completions", json=chat())
    written_by = []
    monkeypatch.setattr(
        crash_dump, "write_whole", lambda *_, **__: written_by.append(threading.get_ident())
    )
    app.state.kept_requests.dump("x").join()
    assert written_by != [threading.get_ident()]
