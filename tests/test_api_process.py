"""The API process, run in this one: what it leaves behind."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.child_processes import renderers_from_now
from support.http import FakeEngine, until
from support.text_models import write_text_folder
from triptych import api_process
from triptych.compose import ChildSetup
from triptych.core.engine_api.model_changes import KeepModel, Sleep
from triptych.core.http import server
from triptych.core.http.listener import bind
from triptych.core.options.config import Config, ServerOptions
from triptych.core.process.typed import decode_json
from triptych.core.transport.control import ControlLine, FromChild, StartFacts


class Line(ControlLine):
    """A supervisor's that asks for nothing."""

    def __init__(self) -> None:
        pass

    def send(self, message: FromChild) -> None:
        self.sent = message


async def test_what_can_wait_begins_when_the_engine_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before that it would slow the engine's start down."""
    monkeypatch.setattr(api_process, "WARM_CHECK_S", 0.0)
    engine = FakeEngine()
    engine.state = replace(engine.state, is_ready=False)
    begun: list[bool] = []
    warming = asyncio.create_task(api_process._warm(engine, lambda: begun.append(True)))
    await asyncio.sleep(0.01)
    assert not begun
    engine.state = replace(engine.state, is_ready=True)
    await asyncio.wait_for(warming, 10)
    assert begun == [True]


def test_times_and_the_sleep_outlive_it() -> None:
    line = Line()
    changes = (KeepModel("a", 3.0), KeepModel("b", math.inf), Sleep(ends_jobs=True))
    api_process._note_changes(line, changes)
    assert isinstance(line.sent, StartFacts)
    fields = {"config": Config(), "models": (), "folder": "", **line.sent.fields}
    setup = decode_json(msgspec.json.encode(fields), ChildSetup)
    assert setup.changes == [*changes[:2], Sleep()]


async def test_chat_templates_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = renderers_from_now()

    async def serve(*args: Any, **options: Any) -> None:
        options["listener"].close()
        until(lambda: bool(started()))

    monkeypatch.setattr(server, "serve", serve)
    config = Config(server=ServerOptions(host="127.0.0.1", port=0))
    await api_process._run(
        Line(),
        ChildSetup(
            config=config,
            models=(write_text_folder(tmp_path / "model"),),
            folder=str(tmp_path),
            listener_fd=bind(config.server).detach(),
        ),
    )
    assert not started()
