"""Chat models of a server: the fields of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from triptych.core.client.connection import Connection
from triptych.modalities.llm.api.remote import RemoteChat


class _Connection:
    """Keeps the bodies that it sends."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, Any]] = []

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return {}

    def events(self, route: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        self.bodies.append(body)
        return iter(())


def test_an_adapter_is_named_as_the_route_names_it() -> None:
    connection = _Connection()
    chat = RemoteChat(cast("Connection", connection), "tiny")
    list(chat.stream([{"role": "user", "content": "x"}], adapter="sql"))
    chat.answer({"prompt": "x"}, {"adapter": "sql"})
    chat.answer({"prompt": "x", "adapter": "law"}, {"adapter": "sql"})
    assert [body["lora_path"] for body in connection.bodies] == ["sql", "sql", "law"]
    assert all("adapter" not in body for body in connection.bodies)
