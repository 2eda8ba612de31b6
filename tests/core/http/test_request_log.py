"""`--log-requests` and its levels."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.http import ANSWER, FakeEngine, chat, in_process, make_app
from triptych.core.http.request_log import PARTIAL_CHARS, masked
from triptych.core.options.config import ServerOptions
from triptych.core.process.logs import configure

SECRET = "my secret " * 300  # longer than what level 2 shows


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure(ServerOptions(log_format="json"), stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


async def _logged(
    tmp_path: Path, log: io.StringIO, level: int
) -> dict[str, list[dict[str, object]]]:
    options = {"log_requests": True, "log_requests_level": level, "access_log": False}
    body = chat(SECRET, temperature=0.5, max_tokens=99, user="ann")
    async with in_process(make_app(tmp_path, FakeEngine(), **options)) as client:
        headers = {"authorization": "Bearer hidden", "x-request-id": "mine"}
        reply = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200
    assert "hidden" not in log.getvalue()
    found: dict[str, list[dict[str, object]]] = {}
    for line in map(json.loads, log.getvalue().splitlines()):
        found.setdefault(line["message"], []).append(line)
    return found


@pytest.mark.parametrize("level", [0, 1])
async def test_the_low_levels_have_no_texts(tmp_path: Path, log: io.StringIO, level: int) -> None:
    found = await _logged(tmp_path, log, level)
    assert not {"secret", "ann", ANSWER} & set(log.getvalue().replace('"', " ").split())
    assert "answer" not in found
    (received,), (ended,) = found["request received"], found["request"]
    assert received["request_id"] == ended["request_id"] == "mine"
    assert received["route"] == "/v1/chat/completions"
    body = received.get("body")
    if level == 0:
        assert body is None
    else:
        assert isinstance(body, dict)
        assert (body["temperature"], body["max_tokens"]) == (0.5, 99)
        assert (body["messages"], body["user"]) == ("1 items", "3 characters")


@pytest.mark.parametrize(("level", "is_whole"), [(2, False), (3, True)])
async def test_the_high_levels_have_texts(
    tmp_path: Path, log: io.StringIO, level: int, is_whole: bool
) -> None:
    found = await _logged(tmp_path, log, level)
    body = found["request received"][0]["body"]
    assert isinstance(body, dict)
    assert body["user"] == "ann"
    assert (SECRET in body["messages"]) == is_whole
    assert is_whole or len(body["messages"]) == PARTIAL_CHARS
    assert found["answer"][0]["text"] == [ANSWER]


async def test_what_may_be_a_credential_is_masked(tmp_path: Path, log: io.StringIO) -> None:
    options = {"log_requests": True, "log_requests_level": 3}
    async with in_process(make_app(tmp_path, FakeEngine(), **options)) as client:
        body = chat(api_key="hidden", tools=[{"type": "mcp", "authorization": "hidden"}])
        await client.post("/v1/chat/completions", json=body)
    assert "request received" in log.getvalue()
    assert "hidden" not in log.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            {"tools": [{"X-Api-Key": "x", "accessToken": "x"}]},
            '{"tools": [{"X-Api-Key": "***", "accessToken": "***"}]}',
        ),
        ({"function": {"arguments": '{"client_secret": "x", "n": 1}'}}, None),
        (
            {"url": "https://ann:x@a.example/i.png?sig=x#top"},
            '{"url": "https://***@a.example/i.png?***#top"}',
        ),
        ({"url": "https://a.example/i.png"}, '{"url": "https://a.example/i.png"}'),
        (
            {"content": "Is https://a.example/?q=1 up?"},
            '{"content": "Is https://a.example/?q=1 up?"}',
        ),
        ({"max_tokens": 3, "stop_token_ids": [1]}, '{"max_tokens": 3, "stop_token_ids": [1]}'),
    ],
)
def test_credentials_are_found_by_any_spelling(value: object, shown: str | None) -> None:
    if shown is None:
        shown = json.dumps({"function": {"arguments": '{"client_secret": "***", "n": 1}'}})
    assert json.dumps(masked(value)) == shown


async def test_a_line_has_a_bounded_number_of_fields(tmp_path: Path, log: io.StringIO) -> None:
    options = {"log_requests": True, "log_requests_level": 1}
    async with in_process(make_app(tmp_path, FakeEngine(), **options)) as client:
        await client.post("/v1/chat/completions", json={f"f{i}": i for i in range(1000)})
    assert "request received" in log.getvalue()
    assert "f999" not in log.getvalue()
