"""Bodies that are made to cost much: each is a clear 4xx, and none comes to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.http import FakeEngine, in_process, refused
from support.responses_app import ask_for, responses_app
from triptych.core.limits import (
    MAX_CONTENT_PARTS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_MESSAGES,
    MAX_TOOLS,
)

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TEXT = {"type": "input_text", "text": ""}
SUMMARY = {"type": "summary_text", "text": ""}


def deep(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num_levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema}}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "a", "schema": schema}}


BODIES: dict[str, dict[str, Any]] = {
    "items": ask_for([USER] * (MAX_MESSAGES + 1)),
    "references": ask_for([{"type": "item_reference", "id": "msg_a"}] * MAX_MESSAGES),
    "parts": ask_for([{**USER, "content": [TEXT] * (MAX_CONTENT_PARTS + 1)}]),
    "parts of all items": ask_for([{**USER, "content": [TEXT] * 1000}] * 17),
    "parts of reasoning": ask_for([{"type": "reasoning", "summary": [SUMMARY] * 1000}] * 17),
    "containers": ask_for([{**USER, "content": [[]] * MAX_JSON_CONTAINERS}]),
    "tools": ask_for(tools=[{**TOOL, "name": f"f{n}"} for n in range(10_000)]),
    "one tool too many": ask_for(tools=[{**TOOL, "name": f"f{n}"} for n in range(MAX_TOOLS + 1)]),
    "a deep body": ask_for(text=form(deep(MAX_JSON_DEPTH))),
    "a deep schema as text": ask_for(text=form({"pattern": "(" * 1000 + "a" + ")" * 1000})),
    "a schema of a megabyte": ask_for(text=form({"enum": [f"{n:07}" for n in range(100_000)]})),
    "calls without results' calls": ask_for(
        [{"type": "function_call_output", "call_id": "c", "output": "a"}] * MAX_MESSAGES
    ),
    "metadata": ask_for(metadata={f"{n}": "a" for n in range(2000)}),
}
WORDS = {
    "items": f"at most {MAX_MESSAGES} items",
    "references": "no item 'msg_a'",
    "parts": f"at most {MAX_CONTENT_PARTS} items",
    "parts of all items": "parts",
    "parts of reasoning": "parts",
    "containers": "objects and arrays",
    "one tool too many": f"at most {MAX_TOOLS} items",
}
"""What some are refused for, which might be something else."""


@pytest.mark.parametrize("name", BODIES)
async def test_a_hostile_body_costs_its_sender_alone(tmp_path: Path, name: str) -> None:
    engine = FakeEngine()
    with responses_app(tmp_path, engine) as app:
        async with in_process(app) as client:
            reply = await client.post("/v1/responses", json=BODIES[name])
            assert reply.status_code in (400, 404, 413), reply.text
            error = refused(reply, reply.status_code)
            assert WORDS.get(name, "") in error["message"]
            assert not engine.submitted
            assert (await client.post("/v1/responses", json=ask_for())).status_code == 200
