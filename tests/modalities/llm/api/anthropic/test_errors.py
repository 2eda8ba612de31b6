"""What the Messages API refuses, and how it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.anthropic_requests import FORM, PATH, TOOL, message
from support.http import FakeEngine, documents, in_process
from support.other_apis import other_apis_app
from triptych.core.errors import EngineDown, Overloaded, RateLimited

# One app of each kind for all: the process that runs its template takes a while to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


PLAIN = {"type": "text", "media_type": "text/plain", "data": "a"}


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A conversation with a document."""
    block = {"type": "document", "source": source, **fields}
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "between_tools"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "less"),
        (
            {"output_format": FORM, "output_config": {"format": {**FORM, "schema": {}}}},
            "output_format and output_config.format",
        ),
        ({"output_config": {"task_budget": {}}}, "task_budget"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "in the client",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "source"),
        (document({"type": "base64", "media_type": "application/pdf", "data": "AA"}), "text block"),
        (document({"type": "url", "url": "http://a/b.pdf"}), "text block"),
        (document({"type": "text", "media_type": "text/html", "data": "a"}), "media_type"),
        (document(PLAIN, citations={"enabled": True}), "cites nothing"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "document", "source": PLAIN}]}
                ]
            },
            "has no document",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "mcp_tool_use"}]}]}, "mcp_tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "thinking",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                    },
                ]
            },
            "tool_result",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}],
                    }
                ]
            },
            "by file id",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "xyz"}]}
                ]
            },
            "'xyz'",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"min_p": 0.5}, "min_p"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_is_refused_is_named(
    idle_app: FastAPI, fields: dict[str, Any], named: str
) -> None:
    async with in_process(idle_app) as client:
        reply = await client.post(PATH, json=message(**fields))
    body = reply.json()
    assert reply.status_code == 400, body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == reply.headers["request-id"]
    assert named in body["error"]["message"]


async def test_another_version_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-01-01"}
    reply = await client.post(PATH, json=message(), headers=headers)
    assert "2023-06-01" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RateLimited("x", retry_after_s=2), 429, "rate_limit_error"),
        (Overloaded("x"), 529, "overloaded_error"),
        (EngineDown("x"), 503, "api_error"),
        (RuntimeError("x"), 500, "api_error"),
    ],
)
async def test_errors_of_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception, status: int, kind: str
) -> None:
    engine.error = error
    for stream in (False, True):
        reply = await client.post(PATH, json=message(stream=stream))
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == kind
        assert ("retry-after" in reply.headers) == (status in (429, 503, 529))


async def test_a_stream_that_breaks_ends_with_an_error(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.error, engine.num_good = Overloaded("x"), 3
    reply = await client.post(PATH, json=message(stream=True))
    last = documents(reply.text)[-1]
    assert reply.text.count("event: error\n") == 1
    assert last["error"] == {"type": "overloaded_error", "message": "x"}
    assert last["request_id"] == reply.headers["request-id"]


async def test_errors_before_the_route(tmp_path: Path, engine: FakeEngine) -> None:
    app = other_apis_app(tmp_path, engine, api_key=("key",), max_request_bytes=2000)
    async with in_process(app) as client:
        key = {"x-api-key": "key"}
        tried = {
            401: await client.post(PATH, json=message()),
            404: await client.post(f"{PATH}/batches", json={}, headers=key),
            405: await client.get(PATH, headers=key),
            413: await client.post(PATH, json=message("x" * 3000), headers=key),
            415: await client.post(PATH, content="x", headers=key),
        }
        other = await client.get("/v1/models")
        own = await client.get("/v1/models/none", headers={"anthropic-version": "1", **key})
        ok = await client.post(PATH, json=message(), headers=key)
    kinds = {}
    for status, reply in tried.items():
        assert reply.status_code == status
        assert reply.json()["request_id"] == reply.headers["request-id"]
        kinds[status] = reply.json()["error"]["type"]
    assert kinds == {
        401: "authentication_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
    }
    assert other.json()["error"]["code"] == "invalid_api_key"
    assert "request-id" not in other.headers
    assert (own.status_code, own.json()["type"]) == (404, "error")
    assert ok.status_code == 200


async def test_a_silence_is_filled(tmp_path: Path) -> None:
    app = other_apis_app(tmp_path, FakeEngine(answer="hi", step_s=0.3), heartbeat_s=0.1)
    async with in_process(app) as client:
        reply = await client.post(PATH, json=message(stream=True))
    assert 'event: ping\ndata: {"type": "ping"}\n\n' in reply.text


async def test_models_are_listed_to_each_in_its_way(client: httpx.AsyncClient) -> None:
    version = {"anthropic-version": "2023-06-01"}
    page = (await client.get("/v1/models", headers=version)).json()
    (model,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
    assert model["type"] == "model"
    assert model["display_name"] == model["id"] == "tiny"
    assert model["created_at"].endswith("Z")
    assert model["max_input_tokens"] == 4096
    assert (await client.get("/v1/models/tiny", headers=version)).json() == model
    after = await client.get("/v1/models", params={"after_id": "tiny"}, headers=version)
    assert after.json()["data"] == []
    wrong = await client.get("/v1/models", params={"before_id": "x"}, headers=version)
    assert wrong.status_code == 404
    assert (await client.get("/v1/models")).json()["object"] == "list"
    assert (await client.get("/v1/models/tiny")).json()["object"] == "model"
