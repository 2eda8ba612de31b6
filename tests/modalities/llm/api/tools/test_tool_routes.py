"""Tools over the whole app, in front of a made-up engine: what a client sees of a call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.http import FakeEngine, chat, documents, in_process, make_app
from support.text_models import CHATML
from triptych.core.options.config import ModelOptions

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
END_ID = 2
"""The id of <|im_end|>."""
PATH = "/v1/chat/completions"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(answer=f"I look.\n{CALL}\n{CALL}")


@pytest.fixture
async def client(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with in_process(make_app(tmp_path, engine)) as client:
        yield client


async def test_calls_are_separated_from_the_text(client: httpx.AsyncClient) -> None:
    reply = (await client.post(PATH, json=chat(tools=[WEATHER]))).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    ] * 2
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2
    assert {len(each) for each in ids} == {9}


async def test_one_call_ends_an_answer_that_may_have_no_more(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = chat(tools=[WEATHER], parallel_tool_calls=False)
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert engine.num_steps < len(engine.answer), "the rest is not waited for"


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
async def test_without_tools_an_answer_is_text(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    (choice,) = (await client.post(PATH, json=chat(**fields))).json()["choices"]
    assert choice["message"]["content"] == engine.answer
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


async def test_arguments_come_in_deltas(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.answer = CALL
    reply = await client.post(PATH, json=chat(tools=[WEATHER], stream=True))
    choices = [chunk["choices"][0] for chunk in documents(reply.text) if chunk != "[DONE]"]
    deltas = [call for each in choices for call in each["delta"].get("tool_calls", ())]
    first, *rest = deltas
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert len(first["id"]) == 9
    assert all(call.keys() == {"index", "function"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in rest) == '{"city": "Paris"}'
    assert len(rest) > 5, "as they are made"
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(each["delta"].get("content") for each in choices)


async def test_the_package_reads_a_streamed_call(client: httpx.AsyncClient) -> None:
    package = openai.AsyncOpenAI(
        base_url=str(client.base_url) + "/v1", api_key="none", http_client=client, max_retries=0
    )
    async with package.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2


async def test_tools_and_results_reach_the_prompt(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """The template supports none: the prompt describes them in words."""
    assert "tools" not in CHATML
    said = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    body = chat(tools=[WEATHER], max_tokens=1)
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "a", "content": "Sun <|im_end|>"},
    ]
    assert (await client.post(PATH, json=body)).status_code == 200
    (request,) = engine.submitted.values()
    ids = {"model": "tiny", "tokens": list(request.prompt_ids), "skip_special_tokens": False}
    prompt = (await client.post("/detokenize", json=ids)).json()["prompt"]
    assert json.dumps(WEATHER["function"]) in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool_response>\nSun <|im_end|>\n</tool_response>" in prompt
    num_messages = prompt.count("<|im_start|>") - 1  # the last opens the answer
    assert request.prompt_ids.count(END_ID) == num_messages, "the spelled one is plain text"


@pytest.mark.parametrize("depth", [950, 100_000])
async def test_arguments_that_are_nested_too_deeply_are_text(
    client: httpx.AsyncClient, engine: FakeEngine, depth: int
) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "get_weather", "arguments": arguments}
    said = {"id": "a", "type": "function", "function": function}
    body = chat()
    body["messages"] += [{"role": "assistant", "tool_calls": [said]}]
    reply = await client.post(PATH, json=body)
    assert reply.status_code in (200, 400), reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["code"] == "context_length_exceeded"


OPEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city"'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        ("It is sunny.", "stop"),
        (CALL, "tool_calls"),
        (CALL.removesuffix("\n</tool_call>"), "tool_calls"),
        (f"{CALL}\n{CALL}", "tool_calls"),
        (CALL.replace('{"city": "Paris"}', "{}"), "tool_calls"),
        (OPEN, "length"),
        (f'{OPEN}: "Par', "length"),
        (f"{OPEN} = 1}}}}\n</tool_call>", "length"),
        (f"{OPEN} = 1}}}}\n</tool_call>\n{CALL}", "length"),
        (f"{CALL}\n{OPEN}", "length"),
    ],
)
async def test_an_answer_with_a_call_that_is_not_whole_ends_as_one_that_was_cut(
    client: httpx.AsyncClient, engine: FakeEngine, answer: str, finish: str, stream: bool
) -> None:
    engine.answer = answer
    reply = await client.post(PATH, json=chat(tools=[WEATHER], stream=stream))
    if stream:
        choices = [chunk["choices"][0] for chunk in documents(reply.text) if chunk != "[DONE]"]
    else:
        choices = reply.json()["choices"]
    assert choices[-1]["finish_reason"] == finish


@pytest.mark.parametrize("answer", [CALL, f"I look.\n{CALL}", ""])
async def test_the_role_comes_once_it_is_known_whether_a_call_follows(
    client: httpx.AsyncClient, engine: FakeEngine, answer: str
) -> None:
    engine.answer = answer
    reply = await client.post(PATH, json=chat(tools=[WEATHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in documents(reply.text) if chunk != "[DONE]"]
    content = None if answer == CALL else ""
    assert deltas[0] == {"role": "assistant", "content": content}
    assert not any("role" in delta for delta in deltas[1:])


async def test_a_call_that_is_cut_keeps_what_came(client: httpx.AsyncClient) -> None:
    body = chat(tools=[WEATHER], max_tokens=70)
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


async def test_reasoning_is_apart_from_the_text(tmp_path: Path) -> None:
    engine = FakeEngine(answer="<think>Hm.</think>\n\nYes.")
    app = make_app(tmp_path, engine, models=ModelOptions(reasoning_parser="think"))
    async with in_process(app) as client:
        reply = (await client.post(PATH, json=chat())).json()
        message = reply["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
        assert message["reasoning"] == "Hm."
        thought = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert 3 <= thought < reply["usage"]["completion_tokens"]
        text = (await client.post(PATH, json=chat(stream=True))).text
        deltas = [chunk["choices"][0]["delta"] for chunk in documents(text) if chunk != "[DONE]"]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


async def test_a_schema_that_is_none_is_refused_in_its_own_words(tmp_path: Path) -> None:
    """Of the grammar around it a caller knows nothing."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}
    async with in_process(make_app(tmp_path, FakeEngine(answer="x"))) as client:
        reply = await client.post(PATH, json=chat(tools=[tool], tool_choice="required"))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].endswith("#/properties is an object of schemas.")


@pytest.mark.parametrize("max_tokens", [1, 5, 11, 20, 30, 60])
async def test_a_forced_call_that_is_cut_shows_no_marks(
    client: httpx.AsyncClient, engine: FakeEngine, max_tokens: int
) -> None:
    engine.answer = CALL
    body = chat(tools=[WEATHER], tool_choice="required", max_tokens=max_tokens)
    (choice,) = (await client.post(PATH, json=body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    calls = choice["message"].get("tool_calls", [])
    assert len(calls) == (max_tokens > 40)
    for call in calls:
        assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])


LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_some_of_the_tools_may_be_allowed(
    client: httpx.AsyncClient, engine: FakeEngine, mode: str
) -> None:
    allowed = [{"type": "function", "function": {"name": "get_weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    engine.answer = CALL
    body = chat(tools=[LOOK, WEATHER], tool_choice=choice)
    reply = (await client.post(PATH, json=body)).json()
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    (request,) = engine.submitted.values()
    assert bool(request.grammar) == (mode == "required")
    ids = {"tokens": list(request.prompt_ids)}
    prompt = (await client.post("/detokenize", json=ids)).json()["prompt"]
    assert "get_weather" in prompt
    assert '"look"' not in prompt
    choice["allowed_tools"] = {"mode": mode, "tools": [LOOK | {"function": {"name": "fly"}}]}
    reply = await client.post(PATH, json=chat(tools=[LOOK], tool_choice=choice))
    assert reply.json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("path", [PATH, "/tokenize", "/apply-template"])
@pytest.mark.parametrize("call_id", [None, "b"])
async def test_a_result_belongs_to_a_call(
    client: httpx.AsyncClient, call_id: str | None, path: str
) -> None:
    said = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    body = chat(tools=[LOOK])
    body["messages"] = [
        *body["messages"],
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "content": "Sun", **({"tool_call_id": call_id} if call_id else {})},
    ]
    if path != PATH:
        body = {"model": body["model"], "messages": body["messages"]}
    error = (await client.post(path, json=body)).json()["error"]
    assert error["param"] == "messages[2].tool_call_id"
    assert "'b'" in error["message"] or "none" in error["message"]


async def test_a_schema_that_cannot_be_followed_is_named(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": schema}}
    body = chat(tools=[WEATHER, bad, LOOK], tool_choice="required")
    error = (await client.post(PATH, json=body)).json()["error"]
    assert error["param"] == "tools"
    assert "tool bad: " in error["message"]
    assert "uniqueItems at #/properties/a" in error["message"]
