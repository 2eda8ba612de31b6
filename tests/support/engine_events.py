"""A reader of a server's engine events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

PATH = "/v1/engine/events"


@contextmanager
def following(url: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream; each has the name that its document says."""

    def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                document = json.loads(line.removeprefix("data: "))
                assert document["type"] == name
                yield document

    with httpx.stream("GET", url + PATH, timeout=10, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events(response)


def next_of(events: Iterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(event for event in events if event["type"] == f"engine.{kind}")
