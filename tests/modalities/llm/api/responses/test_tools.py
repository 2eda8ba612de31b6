"""Tools of the Responses API: functions in namespaces, and tools that a server would run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from support.http import FakeEngine, documents, in_process
from support.responses_app import ask_for, call_of, check_order, responses_app
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.responses.conversation import chat_fields
from triptych.modalities.llm.api.responses.items import KEPT_ITEM
from triptych.modalities.llm.api.responses.protocol import ResponseRequest
from triptych.modalities.llm.api.responses.tools import HostedKind

TOOL: dict[str, Any] = {"type": "function", "name": "wait", "description": "Wait.", "strict": False}
OTHER = {**TOOL, "name": "close", "parameters": {"type": "object", "properties": {}}}


def namespace(name: str, *tools: dict[str, Any], about: str = "Agents.") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": about, "tools": list(tools)}


def chat(**fields: Any) -> dict[str, Any]:
    """What chat is asked."""
    body = ResponseRequest.model_validate(ask_for([{"role": "user", "content": "hi"}], **fields))
    return chat_fields(body, [])


def names(**fields: Any) -> list[str]:
    return [tool["function"]["name"] for tool in chat(**fields)["tools"]]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([TOOL], ["wait"]),
        ([namespace("agents", TOOL, OTHER)], ["agents__wait", "agents__close"]),
        ([TOOL, namespace("agents", TOOL)], ["wait", "agents__wait"]),
        ([namespace("a", TOOL), namespace("b", TOOL)], ["a__wait", "b__wait"]),
        ([namespace("mcp__files__", TOOL)], ["mcp__files__wait"]),
        ([{"type": "web_search"}, TOOL], ["wait"]),
    ],
)
def test_the_model_knows_each_function_by_one_name(tools: list[Any], expected: list[str]) -> None:
    assert names(tools=tools) == expected


def test_the_model_reads_of_a_namespace_once() -> None:
    tools = chat(tools=[namespace("agents", TOOL, OTHER), namespace("b", TOOL, about="")])["tools"]
    said = [tool["function"].get("description") for tool in tools]
    assert said == ["Agents.\n\nWait.", "Wait.", "Wait."]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("wait", "wait"), ("close", "a__close"), ("a__wait", "a__wait"), ("a__close", "a__close")],
)
def test_a_choice_finds_a_function_by_either_name(name: str, expected: str) -> None:
    tools = [TOOL, namespace("a", TOOL, OTHER)]
    named = {"type": "function", "name": name}
    assert chat(tools=tools, tool_choice=named)["tool_choice"]["function"]["name"] == expected
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    assert names(tools=tools, tool_choice=allowed) == [expected]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("space", ["multi_agent_v1", "mcp__files__", ""])
async def test_a_call_comes_back_where_its_client_has_the_function(
    tmp_path: Path, space: str, is_streamed: bool
) -> None:
    tools = [namespace(space, TOOL), {**TOOL, "name": "x"}] if space else [TOOL]
    known = f"{space.removesuffix('__')}__wait" if space else "wait"
    engine = FakeEngine(answer=call_of(known, n=1))
    models = ModelOptions(tool_call_parser="hermes", max_length=4096)
    with responses_app(tmp_path, engine, models=models) as app:
        async with in_process(app) as client:
            body = ask_for(tools=tools, stream=is_streamed)
            reply = await client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            if is_streamed:
                events = documents(reply.text)
                check_order(events)
                answer = events[-1]["response"]
            else:
                answer = reply.json()
            (call,) = answer["output"]
            assert call["name"] == "wait"
            assert call.get("namespace", "") == space
            assert answer["tools"][0]["type"] == tools[0]["type"]
            result = {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": "ok",
                "namespace": space,
            }
            again = await client.post("/v1/responses", json=ask_for([call, result], tools=tools))
            after = ask_for([result], tools=tools, previous_response_id=answer["id"])
            kept = await client.post("/v1/responses", json=after)
    assert (again.status_code, kept.status_code) == (200, 200), again.text + kept.text
    call_item = KEPT_ITEM.validate_python(call)
    fields = chat_fields(ResponseRequest.model_validate(ask_for("x")), [call_item])
    assert fields["messages"][0]["tool_calls"][0]["function"]["name"] == known


@pytest.mark.parametrize("kind", get_args(HostedKind))
async def test_tools_that_a_server_would_run_are_left_out_and_reported(
    tmp_path: Path, kind: str
) -> None:
    hosted = {"type": kind, "external_web_access": False, "filters": {"x": [1]}}
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            body = ask_for(tools=[hosted, TOOL, hosted], tool_choice="auto")
            reply = await client.post("/v1/responses", json=body)
            counted = await client.post("/v1/responses/input_tokens", json=ask_for(tools=[hosted]))
            plain = await client.post("/v1/responses/input_tokens", json=ask_for())
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == f"tools.{kind}"
    assert [tool["type"] for tool in reply.json()["tools"]] == ["function"]
    assert counted.json() == plain.json()
    assert counted.headers["x-triptych-ignored"] == f"tools.{kind}"


async def test_the_log_names_a_kind_of_tool_that_is_left_out_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = ask_for(tools=[{"type": "web_search"}, {"type": "mcp"}, TOOL])
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            for _ in range(2):
                assert (await client.post("/v1/responses", json=body)).status_code == 200
    warned = [record for record in caplog.records if "left out" in record.message]
    assert [record.levelname for record in warned] == ["WARNING"] * 2
    assert [record.fields["tool"] for record in warned] == ["tools.web_search", "tools.mcp"]


CODEX = {
    "instructions": "You are a coding agent.",
    "tools": [
        {**TOOL, "name": "exec_command"},
        namespace(
            "multi_agent_v1", {**TOOL, "name": "close_agent"}, {**TOOL, "name": "wait_agent"}
        ),
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a21f21",
    "client_metadata": {"session_id": "01a21f21", "turn_id": "01a21f22"},
}
"""What Codex 0.171 asks, shortened."""


async def test_a_second_turn_of_codex(tmp_path: Path) -> None:
    engine = FakeEngine(answer=call_of("multi_agent_v1__close_agent", target="a"))
    models = ModelOptions(tool_call_parser="hermes", max_length=4096)
    asked = {
        "type": "message",
        "id": "msg_01a21f21-fff7-7f32-9dc2-d1c0d28b4c85",
        "role": "user",
        "content": [{"type": "input_text", "text": "Say hi"}],
    }
    leading = {**asked, "id": "msg_2", "role": "developer"}
    with responses_app(tmp_path, engine, models=models) as app:
        async with in_process(app) as client:
            first = await client.post("/v1/responses", json=ask_for([leading, asked], **CODEX))
            assert first.status_code == 200, first.text
            assert set(first.headers["x-triptych-ignored"].split(", ")) == {
                "client_metadata",
                "tools.web_search",
            }
            (call,) = documents(first.text)[-1]["response"]["output"]
            assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
            result = {
                "type": "function_call_output",
                "id": "fco_01a21f22",
                "call_id": call["call_id"],
                "output": "no such agent",
            }
            items = [leading, asked, call, result]
            second = await client.post("/v1/responses", json=ask_for(items, **CODEX))
    assert second.status_code == 200, second.text
    assert documents(second.text)[-1]["type"] == "response.completed"
