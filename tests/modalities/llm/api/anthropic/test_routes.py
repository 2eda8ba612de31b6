"""Anthropic's API over the whole app, in front of a made-up engine."""

from __future__ import annotations

import base64
import json
import re
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.anthropic_requests import COUNT, PATH, TOOL, message
from support.http import ANSWER, FakeEngine, documents, in_process
from support.other_apis import CALL, WEATHER_SCHEMA
from triptych.core import limits
from triptych.modalities.llm.api import translation
from triptych.modalities.llm.api.anthropic.conversation import chat_fields
from triptych.modalities.llm.api.anthropic.protocol import MessagesRequest
from triptych.modalities.llm.api.generation import chat_request
from triptych.modalities.llm.api.protocol import ChatRequest

# One app of each kind for all: the process that runs its template takes a while to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")


ADAPTIVE = {"type": "adaptive"}


async def test_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    reply = await client.post(PATH, json=message())
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    body = reply.json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 20,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": len(ANSWER),
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_the_count_is_that_of_the_usage(client: httpx.AsyncClient) -> None:
    body = message("hi there", system=[{"type": "text", "text": "Be brief."}], tools=[TOOL])
    counted = (await client.post(COUNT, json={**body, "max_tokens": 1})).json()
    assert "max_tokens" in counted["error"]["message"], "a field of the other route"
    del body["max_tokens"]
    (count,) = (await client.post(COUNT, json=body)).json().values()
    usage = (await client.post(PATH, json={**body, "max_tokens": 3})).json()["usage"]
    assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_what_was_asked_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 8}
    assert (await client.post(PATH, json=message(**fields))).status_code == 200
    (request,) = engine.submitted.values()
    assert {name: getattr(request.sampling, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": ["xyz", "brown"]}, "stop_sequence", "brown"),
        ({"max_tokens": 5}, "max_tokens", None),
        ({"max_tokens": 200_000}, "end_turn", None),
    ],
)
async def test_why_it_ended(
    client: httpx.AsyncClient, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    body = (await client.post(PATH, json=message(**fields))).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


async def test_an_answer_ends_with_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.is_endless = True
    body = (await client.post(PATH, json=message("x" * 3900, max_tokens=32_000))).json()
    assert body["stop_reason"] == "model_context_window_exceeded"
    used = body["usage"]
    assert used.pop("output_tokens_details") == {"thinking_tokens": 0}
    assert sum(used.values()) == 4096


async def test_a_prompt_that_is_too_long(client: httpx.AsyncClient) -> None:
    reply = await client.post(PATH, json=message("x" * 5000))
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["message"].startswith("prompt is too long: ")


async def test_the_order_of_events(thinker: httpx.AsyncClient) -> None:
    """As the public description has it: a start, whole blocks in order, one end."""
    reply = await thinker.post(PATH, json=message(stream=True, tools=[TOOL], thinking=ADAPTIVE))
    assert reply.headers["content-type"].startswith("text/event-stream")
    names = [line[7:] for line in reply.text.splitlines() if line.startswith("event: ")]
    events = documents(reply.text)
    assert [event["type"] for event in events] == names
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    kinds, index, is_open = [], -1, False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            index, is_open = index + 1, True
            kinds.append(event["content_block"]["type"])
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
        else:
            assert event["type"] == "content_block_delta"
            assert is_open
        assert event["index"] == index
    assert not is_open
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    end = events[-2]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] > 50
    assert end["usage"]["output_tokens_details"]["thinking_tokens"] > 5


async def test_the_deltas_of_blocks(thinker: httpx.AsyncClient) -> None:
    reply = await thinker.post(PATH, json=message(stream=True, tools=[TOOL], thinking=ADAPTIVE))
    deltas = [event for event in documents(reply.text) if event["type"] == "content_block_delta"]
    of_block = [[each["delta"] for each in deltas if each["index"] == n] for n in range(4)]
    assert "".join(each.get("thinking", "") for each in of_block[0]) == "Hm, well."
    assert of_block[0][-1]["type"] == "signature_delta"
    assert of_block[0][-1]["signature"]
    assert "".join(each["text"] for each in of_block[1]) == "I look."
    for pieces in of_block[2:]:
        assert {each["type"] for each in pieces} == {"input_json_delta"}
        assert "".join(each["partial_json"] for each in pieces) == '{"city": "Paris"}'


async def test_reasoning_may_be_left_out(thinker: httpx.AsyncClient) -> None:
    thinking = {**ADAPTIVE, "display": "omitted"}
    body = (await thinker.post(PATH, json=message(thinking=thinking))).json()
    first = body["content"][0]
    assert (first["type"], first["thinking"]) == ("thinking", "")
    assert first["signature"]
    assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 5


async def test_a_budget_that_cannot_be_kept_is_refused(thinker: httpx.AsyncClient) -> None:
    """The model here marks its reasoning by words."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = await thinker.post(PATH, json=message(thinking=thinking, max_tokens=2000))
    assert reply.json()["error"]["message"].startswith(
        "thinking.budget_tokens: tiny marks reasoning"
    )


async def test_a_form_that_cannot_be_followed_is_named(client: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "schema": {"type": "string", "not": {"const": ""}}}
    reply = await client.post(PATH, json=message(output_config={"format": form}))
    assert reply.status_code == 400
    assert "not" in reply.json()["error"]["message"]
    assert reply.json()["error"]["message"].startswith("output_config.format: ")
    older = await client.post(PATH, json=message(output_format=form))
    assert older.json()["error"]["message"].startswith("output_format: ")


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_reasoning_without_a_request_for_it_is_not_shown(
    thinker: httpx.AsyncClient, thinking: Any
) -> None:
    body = (await thinker.post(PATH, json=message(tools=[TOOL], thinking=thinking))).json()
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "tool_use"]
    assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 5


@pytest.mark.parametrize(
    ("thinking", "is_on", "most"),
    [
        (None, False, None),
        ({"type": "disabled"}, False, None),
        (ADAPTIVE, None, None),
        ({"type": "enabled", "budget_tokens": 200}, True, 200),
    ],
)
async def test_thinking_sets_the_options_of_reasoning(
    thinking: Any, is_on: bool | None, most: int | None
) -> None:
    chat = chat_request(chat_fields(MessagesRequest.model_validate(message(thinking=thinking))))
    assert chat.template_options().get("enable_thinking") is is_on
    assert chat.max_reasoning_tokens == most


CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}
TEXT = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    ("turns", "named"),
    [
        ([[RESULT]], "tool_result 'a'"),
        ([[TEXT], [CALLED], [TEXT]], "tool_use 'a' has no"),
        ([[TEXT], [CALLED], [TEXT, RESULT]], "begins with its tool_result"),
        ([[TEXT], [CALLED], [RESULT, RESULT]], "one tool_use_id"),
        ([[TEXT], [CALLED, CALLED], [RESULT]], "one id"),
        ([[TEXT], [CALLED], [RESULT], [CALLED], [RESULT]], "one id"),
        ([[TEXT], [CALLED], [RESULT], [TEXT], [RESULT]], "tool_result 'a'"),
        ([[TEXT], [CALLED]], "tool_use 'a' has no"),
    ],
)
async def test_calls_and_results_belong_together(
    idle_app: FastAPI, turns: list[Any], named: str
) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    async with in_process(idle_app) as client:
        reply = await client.post(PATH, json=message(messages=messages))
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]


@pytest.mark.parametrize("blocks", [[TEXT] * 4, [{**RESULT, "content": [TEXT] * 3}]])
async def test_blocks_are_bounded(
    idle_app: FastAPI, monkeypatch: pytest.MonkeyPatch, blocks: list[Any]
) -> None:
    monkeypatch.setattr(limits, "MAX_CONVERSATION_PARTS", 7)
    messages = [{"role": "user", "content": blocks}] * 2
    async with in_process(idle_app) as client:
        reply = await client.post(PATH, json=message(messages=messages))
    assert "at most 7 parts" in reply.json()["error"]["message"]


async def test_bodies_are_translated_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def watched(fields: Any) -> ChatRequest:
        threads.append(threading.current_thread())
        return chat_request(fields)

    monkeypatch.setattr(translation, "chat_request", watched)
    assert (await client.post(PATH, json=message())).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_a_file_in_a_schema_is_what_it_was(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    data = base64.b64encode(bytes(900)).decode()
    source = {"type": "base64", "data": data}
    schema = {**WEATHER_SCHEMA, "examples": [{"content": [{"source": source}]}]}
    body = message(tools=[{**TOOL, "input_schema": schema}])
    reply = await client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    (request,) = engine.submitted.values()
    ids = {"model": "tiny", "tokens": list(request.prompt_ids)}
    assert data in (await client.post("/detokenize", json=ids)).json()["prompt"]


async def test_ids_of_calls_are_short_in_prompts(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.answer = CALL
    begun = message(tools=[TOOL])
    (call,) = (await client.post(PATH, json=begun)).json()["content"]
    assert re.fullmatch("toolu_[A-Za-z0-9]{9}", call["id"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sun"}
    turns = [
        *begun["messages"],
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    fields = chat_fields(MessagesRequest.model_validate(begun | {"messages": turns}))
    *_, called, answered = fields["messages"]
    short = call["id"].removeprefix("toolu_")
    assert (called["tool_calls"][0]["id"], answered["tool_call_id"]) == (short, short)


async def test_tool_choice(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.answer = f"{CALL}\n{CALL}"
    choices: dict[str, Any] = {
        "auto": {"type": "auto", "disable_parallel_tool_use": True},
        "none": {"type": "none"},
        "named": {"type": "tool", "name": "get_weather"},
        "any": {"type": "any"},
    }
    found = {}
    for name, choice in choices.items():
        reply = await client.post(PATH, json=message(tools=[TOOL], tool_choice=choice))
        found[name] = [block["type"] for block in reply.json()["content"]]
    assert found["auto"] == ["tool_use"]
    assert found["none"] == ["text"]
    is_forced = [bool(request.grammar) for request in engine.submitted.values()]
    assert is_forced == [False, False, True, True]


async def test_the_prompt_that_reaches_the_model(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Turns, results of tools and system blocks, in the words of the template."""
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "Sun"},
        {
            "type": "tool_result",
            "tool_use_id": "b",
            "content": [{"type": "text", "text": "No such city"}],
            "is_error": True,
        },
        {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "Well?"},
    ]
    calls = [
        {"type": "tool_use", "id": name, "name": "get_weather", "input": {"city": name}}
        for name in "ab"
    ]
    reasoning = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "AAAA"},
    ]
    said = {"type": "text", "text": "I look."}
    body = message(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        messages=[
            {"role": "user", "content": "Where"},
            {"role": "user", "content": "is sun?"},
            {"role": "assistant", "content": [*reasoning, said, *calls]},
            {"role": "user", "content": results},
        ],
    )
    assert (await client.post(PATH, json=body)).status_code == 200
    (request,) = engine.submitted.values()
    ids = {"model": "tiny", "tokens": list(request.prompt_ids), "skip_special_tokens": False}
    prompt = (await client.post("/detokenize", json=ids)).json()["prompt"]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
    result = "<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n"
    assert prompt == (
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhere\n\nis sun?<|im_end|>\n"
        f"<|im_start|>assistant\nI look.\n\n{call % 'a'}\n\n{call % 'b'}<|im_end|>\n"
        f"{result % 'Sun'}{result % 'Error: No such city'}"
        "<|im_start|>user\nSo?\n\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_last_words_of_the_assistant_go_on(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    begun = {"role": "assistant", "content": "The answer is ("}
    body = message()
    assert (
        await client.post(PATH, json={**body, "messages": [*body["messages"], begun]})
    ).status_code == 200
    (request,) = engine.submitted.values()
    ids = {"model": "tiny", "tokens": list(request.prompt_ids)}
    prompt = (await client.post("/detokenize", json=ids)).json()["prompt"]
    assert prompt.endswith("assistant\nThe answer is (")


async def test_a_file_in_a_call_is_what_it_was(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """It stands where images do, and is none."""
    source = {"type": "base64", "data": base64.b64encode(bytes(900)).decode()}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"source": source}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    body = message([result])
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    body["messages"] = earlier + body["messages"]
    assert (await client.post(PATH, json=body)).status_code == 200
    (request,) = engine.submitted.values()
    ids = {"model": "tiny", "tokens": list(request.prompt_ids)}
    assert source["data"] in (await client.post("/detokenize", json=ids)).json()["prompt"]


async def test_a_form(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    form = {"type": "json_schema", "schema": WEATHER_SCHEMA}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        await client.post(PATH, json=message(**fields))
    first, second = engine.submitted.values()
    assert first.grammar == second.grammar
    assert first.grammar is not None


async def test_a_coding_assistant(client: httpx.AsyncClient) -> None:
    """The fields that such clients send with every request."""
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    tools = [
        {**TOOL, "name": f"mcp__server__tool_{n}", "eager_input_streaming": True, "type": "custom"}
        for n in range(60)
    ]
    tools[-1]["cache_control"] = cached
    body = message(
        max_tokens=32_000,
        temperature=1,
        system=[{"type": "text", "text": "You code.", "cache_control": cached}],
        tools=tools,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "medium"},
        metadata={"user_id": json.dumps({"device_id": "a" * 64, "session_id": "b" * 36})},
        diagnostics={"previous_message_id": None},
        service_tier="auto",
        speed="standard",
        mcp_servers=[],
        tool_choice={"type": "none"},
    )
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    reply = await client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text


async def test_hints_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    reply = await client.post(PATH, json=message(speed="fast", inference_geo="eu"))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == "inference_geo, speed"


async def test_reasoning_is_asked_of_a_model_that_does_not_reason(
    client: httpx.AsyncClient,
) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 9}}
    reply = await client.post(PATH, json=message(**asked))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == "thinking"
    off = await client.post(PATH, json=message(thinking={"type": "disabled"}))
    assert "x-triptych-ignored" not in off.headers


async def test_reasoning_is_asked_of_a_model_that_reasons(thinker: httpx.AsyncClient) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 9}}
    reply = await thinker.post(PATH, json=message(**asked))
    assert "x-triptych-ignored" not in reply.headers


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_no_blocks_are_an_empty_text(client: httpx.AsyncClient, place: int) -> None:
    counts = []
    for nothing in ([], "", [{"type": "text", "text": ""}]):
        turns = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
        turns[place]["content"] = nothing  # type: ignore[assignment]
        body = {"model": "tiny", "messages": turns[: place + 1]}
        reply = await client.post(COUNT, json=body)
        assert reply.status_code == 200, reply.text
        counts.append(reply.json()["input_tokens"])
    assert len(set(counts)) == 1
