"""The Open Responses specification: what its public compliance suite asks, and what must come.

The seven cases are those of the suite; the tables say in short what its schemas require.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from support.http import FakeEngine, documents, in_process
from support.images import image, saved
from support.responses_app import SeeingEncoder, call_of, check_order, responses_app
from triptych.core.options.config import ModelOptions

_TEXT, _TEXT_OR_NULL, _COUNT_OR_NULL = (str,), (str, NoneType), (int, NoneType)
RESPONSE: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "object", "status", "model", "truncation", "service_tier"), _TEXT),
    **dict.fromkeys(("created_at", "top_logprobs"), (int,)),
    **dict.fromkeys(("completed_at", "max_output_tokens", "max_tool_calls"), _COUNT_OR_NULL),
    **dict.fromkeys(
        ("previous_response_id", "instructions", "user", "safety_identifier", "prompt_cache_key"),
        _TEXT_OR_NULL,
    ),
    **dict.fromkeys(
        ("top_p", "temperature", "presence_penalty", "frequency_penalty"), (int, float)
    ),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), (bool,)),
    **dict.fromkeys(("output", "tools"), (list,)),
    **dict.fromkeys(("text", "metadata"), (dict,)),
    **dict.fromkeys(("incomplete_details", "error", "reasoning", "usage"), (dict, NoneType)),
    "tool_choice": (str, dict),
}
USAGE = {
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "input_tokens_details",
    "output_tokens_details",
}
ITEMS: Mapping[str, set[str]] = {
    "message": {"id", "status", "role", "content"},
    "function_call": {"id", "status", "call_id", "name", "arguments"},
    "reasoning": {"id", "summary"},
}
_IN_ITEM = {"item_id", "output_index"}
_IN_PART = {*_IN_ITEM, "content_index"}
EVENTS: Mapping[str, set[str]] = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.completed": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": {*_IN_PART, "part"},
    "response.content_part.done": {*_IN_PART, "part"},
    "response.output_text.delta": {*_IN_PART, "delta", "logprobs"},
    "response.output_text.done": {*_IN_PART, "text", "logprobs"},
    "response.function_call_arguments.delta": {*_IN_ITEM, "delta"},
    "response.function_call_arguments.done": {*_IN_ITEM, "arguments"},
}
CALL_EVENTS = {
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
}
"""What a stream with a call has at least."""


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


WEATHER = {
    "input": [message("user", "What's the weather like in San Francisco?")],
    "tools": [
        {
            "type": "function",
            "name": "get_weather",
            "description": "Get the current weather for a location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {
                        "type": "string",
                        "description": "The city and state, e.g. San Francisco, CA",
                    }
                },
                "required": ["location"],
            },
        }
    ],
}
URL = f"data:image/png;base64,{base64.b64encode(saved(image())).decode()}"
CASES: Mapping[str, tuple[dict[str, Any], str]] = {
    "basic-response": (
        {"input": [message("user", "Say hello in exactly 3 words.")]},
        "message",
    ),
    "streaming-response": (
        {"input": [message("user", "Count from 1 to 5.")], "stream": True},
        "message",
    ),
    "system-prompt": (
        {
            "input": [
                message("system", "You are a pirate. Always respond in pirate speak."),
                message("user", "Say hello."),
            ]
        },
        "message",
    ),
    "tool-calling": (WEATHER, "function_call"),
    "tool-calling-streaming": ({**WEATHER, "stream": True}, "function_call"),
    "image-input": (
        {
            "input": [
                message(
                    "user",
                    [
                        {"type": "input_text", "text": "What do you see in this image?"},
                        {"type": "input_image", "image_url": URL},
                    ],
                )
            ]
        },
        "message",
    ),
    "multi-turn": (
        {
            "input": [
                message("user", "My name is Alice."),
                message("assistant", "Hello Alice! How can I help you today?"),
                message("user", "What is my name?"),
            ]
        },
        "message",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_case_of_the_compliance_suite(tmp_path: Path, name: str) -> None:
    fields, kind = CASES[name]
    call = call_of("get_weather", location="San Francisco, CA")
    engine = FakeEngine(answer=call if kind == "function_call" else "Hello.")
    encoder = SeeingEncoder() if name == "image-input" else None
    models = ModelOptions(tool_call_parser="hermes")
    with responses_app(tmp_path, engine, models=models, encoder=encoder) as app:
        async with in_process(app) as client:
            body = {"model": "tiny", "stream": False, **fields}
            reply = await client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    if fields.get("stream"):
        events = documents(reply.text)
        check_order(events)
        for event in events:
            assert event.keys() >= EVENTS[event["type"]] | {"sequence_number"}
        if kind == "function_call":
            assert {event["type"] for event in events} >= CALL_EVENTS
        response = events[-1]["response"]
    else:
        response = reply.json()
    check_response(response)
    assert response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == [kind]


def check_response(response: dict[str, Any]) -> None:
    """Fail unless the answer has what the schemas require."""
    for name, kinds in RESPONSE.items():
        assert name in response, name
        assert type(response[name]) in kinds, name
    assert response["object"] == "response"
    assert response["usage"].keys() >= USAGE
    assert response["usage"]["input_tokens_details"].keys() >= {"cached_tokens"}
    assert response["usage"]["output_tokens_details"].keys() >= {"reasoning_tokens"}
    for item in response["output"]:
        assert item.keys() >= ITEMS[item["type"]]
        for part in item.get("content", ()):
            assert part.keys() >= {"type", "text", "annotations"}
    for tool in response["tools"]:
        assert tool.keys() >= {"type", "name", "description", "parameters", "strict"}


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
async def test_penalties_are_those_that_were_asked_for(tmp_path: Path, name: str) -> None:
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            for value in (None, 0.5):
                body = {"model": "tiny", "input": "hi", name: value}
                reply = (await client.post("/v1/responses", json=body)).json()
                assert reply[name] == (value or 0)
