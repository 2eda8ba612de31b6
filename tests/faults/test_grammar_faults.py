"""Hostile schemas, patterns and grammars: a 4xx for their sender, and everybody else is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.child_processes import grammar_checkers
from support.http import FakeEngine, chat, in_process, make_app, refused
from triptych.modalities.llm.api import grammars

CHAT = "/v1/chat/completions"


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def wide(num: int) -> dict[str, Any]:
    return {"properties": {f"p{n}": {"type": "string", "pattern": f"a{{{n}}}"} for n in range(num)}}


def combined(num: int) -> dict[str, Any]:
    each = {"anyOf": [wide(1) | {"minProperties": n} for n in range(num)]}
    return {"allOf": [each for _ in range(num)]}


HOSTILE: dict[str, dict[str, Any]] = {
    "1 MB": {"guided_json": {"enum": [f"value {n}" * 9 for n in range(10_000)]}},
    "1 MB of text": {"guided_json": json.dumps({"enum": ["x" * 10**6]})},
    "1 MB of a pattern": {"guided_regex": "a?" * 500_000},
    "deep": {"guided_json": nested(1000)},
    "deep arrays": {"guided_json": "[" * 100_000},
    "deep pattern": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "deep grammar": {"guided_grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
    "wide": {"guided_json": wide(4000)},
    "combined": {"guided_json": combined(24)},
    "endless": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "fetching": {"guided_json": {"$ref": "http://169.254.169.254/latest"}},
    "reading": {"guided_json": {"$ref": "file:///etc/passwd"}},
}

COSTLY = (  # refused where the machine or the vocabulary makes them slow: they may be served
    {"guided_regex": "(x{1000}){1000}"},
    {"guided_regex": "(.{1,500}){1,500}"},
    {"guided_grammar": "start: " + " ".join(['"a"?'] * 20_000)},
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "LIMITS", replace(grammars.LIMITS, cpu_s=1))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(make_app(tmp_path, FakeEngine())) as client:
        yield client


@pytest.mark.timeout(120)
async def test_a_hostile_form_is_refused_while_others_are_answered(
    client: httpx.AsyncClient,
) -> None:
    """All of them at once, some twice; in between a form that is fine, and none at all."""
    await client.post(CHAT, json=chat(guided_choice=["yes", "no"]))
    hostile = [client.post(CHAT, json=chat(**asked)) for asked in HOSTILE.values()]
    fine = [client.post(CHAT, json=chat(guided_choice=["yes", "no"])) for _ in range(4)]
    free = [client.post(CHAT, json=chat()) for _ in range(4)]
    costly = [client.post(CHAT, json=chat(**asked)) for asked in COSTLY]
    replies = await asyncio.gather(*hostile, *fine, *free, *costly)
    for (name, asked), reply in zip(HOSTILE.items(), replies, strict=False):
        assert reply.status_code in (400, 413), (name, reply.text)
        error = refused(reply, reply.status_code)
        # A body of too many fields is refused as such, before anybody looks for a schema in it.
        assert (error["param"] or next(iter(asked))).startswith(next(iter(asked)))
        assert len(error["message"]) < 400
    served = [reply.status_code for reply in replies[len(HOSTILE) :]]
    assert served[:8] == [200] * 8
    assert set(served[8:]) <= {200, 400}


async def test_a_child_that_is_killed_costs_no_request(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = grammar_checkers()
    assert (await client.post(CHAT, json=chat(guided_regex="a"))).status_code == 200
    (child,) = [each for each in grammar_checkers() if each not in before]
    child.suspend()
    asking = asyncio.create_task(client.post(CHAT, json=chat(guided_regex="ab")))
    await asyncio.sleep(0.1)
    child.kill()
    assert (await asking).status_code == 200
    assert (await client.post(CHAT, json=chat(guided_regex="b"))).status_code == 200


async def test_what_was_checked_is_not_checked_again(client: httpx.AsyncClient) -> None:
    before = grammar_checkers()
    for _ in range(3):
        assert (await client.post(CHAT, json=chat(guided_regex="ab*"))).status_code == 200
    (child,) = [each for each in grammar_checkers() if each not in before]
    child.kill()
    child.wait()
    assert (await client.post(CHAT, json=chat(guided_regex="ab*"))).status_code == 200
    assert [each for each in grammar_checkers() if each not in before] == []


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


TOOLS: dict[str, dict[str, Any]] = {
    "10,000 tools": {"tools": [tool(f"f{n}", properties={"a": {}}) for n in range(10_000)]},
    "a deep tool": {"tools": [tool("f", **json.loads(nested(30)))], "tool_choice": "required"},
    "a wide tool": {"tools": [tool("f", **wide(1500))], "tool_choice": "required"},
    "a result of 10 MB": {
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "x" * 10**7},
        ]
    },
}


async def test_tools_beyond_all_measure_are_refused_while_others_are_answered(
    client: httpx.AsyncClient,
) -> None:
    hostile = [client.post(CHAT, json=chat() | asked) for asked in TOOLS.values()]
    free = [client.post(CHAT, json=chat()) for _ in range(4)]
    replies = await asyncio.gather(*hostile, *free)
    assert {reply.status_code for reply in replies[len(TOOLS) :]} == {200}
    found = {name: reply.status_code for name, reply in zip(TOOLS, replies, strict=False)}
    assert found["a deep tool"] == 200, "thirty levels are no fault"
    assert {found.pop(name) for name in ("10,000 tools", "a wide tool", "a result of 10 MB")} <= {
        400,
        413,
    }
    for reply in replies[: len(TOOLS)]:
        if reply.status_code != 200:
            assert len(refused(reply, reply.status_code)["message"]) < 400
