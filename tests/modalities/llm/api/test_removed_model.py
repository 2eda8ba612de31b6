"""A request whose model is deleted under it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.http import FakeEngine, make_service
from triptych.core.errors import Draining, UnknownModel


async def test_a_deleted_model_is_unknown_and_the_server_does_not_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(tmp_path, FakeEngine())
    text = service.models["tiny"]

    async def encode(*args: Any, **kwargs: Any) -> NoReturn:
        await service.remove("tiny")  # its template's process ends
        raise Draining("The server is shutting down.")

    monkeypatch.setattr(type(text), "encode_messages", encode)
    with pytest.raises(UnknownModel):
        await service.encode_chat("tiny", [{"role": "user", "content": "hi"}])
