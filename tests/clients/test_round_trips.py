"""Whatever the official packages make of an answer is accepted back, turn after turn.

Each way to get an answer from the `openai`, `anthropic` and `ollama` packages meets each kind of
answer; the object that comes is sent back with what its calls came to, three times over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import FakeEngine
from support.responses_app import responses_app
from support.text_models import byte_tokenizer
from triptych.core.options.config import ModelOptions

openai = pytest.importorskip("openai", reason="part of the extra `test`")
anthropic = pytest.importorskip("anthropic", reason="part of the extra `test`")
httpx2 = pytest.importorskip("httpx2", reason="comes with anthropic")
ollama = pytest.importorskip("ollama", reason="part of the extra `test`")

# One app for all: the process that runs its template takes a while to start.
pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = "save"
SCHEMA: dict[str, Any] = {"type": "object", "additionalProperties": True}
BIG = "123456789012345678901234567890"


def called(arguments: str) -> str:
    """How the model writes a call."""
    return f'<tool_call>\n{{"name": "{NAME}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS: Mapping[str, tuple[str, str]] = {
    "words": ("It is sunny.", "It is sunny."),
    "reasoning": ("<think>\nHm.\n</think>\n\nIt is sunny.", "It is sunny."),
    "call": (called('{"city": "Paris"}'), "Paris"),
    "no arguments": (called("{}"), NAME),
    "words and two calls": (f"I look.\n{called('{}')}\n{called('[]')}", "I look."),
    "reasoning and a call": (f"<think>\nHm.\n</think>\n\n{called('{}')}", NAME),
    "big integer": (called(f'{{"n": {BIG}}}'), BIG),
    "big negative integer": (called(f'{{"n": [-{BIG}]}}'), BIG),
    "int64": (called('{"n": 9223372036854775807}'), "9223372036854775807"),
    "long fraction": (called('{"n": 0.1234567890123456789}'), "0.12345678901234"),
    "huge number": (called('{"n": 1e999}'), NAME),
    "repeated keys": (called('{"a": 1, "a": 2}'), NAME),
    "lone surrogate": (called('{"s": "a\\ud83d"}'), NAME),
    "a pair of surrogates": (called('{"s": "\\ud83d\\ude00"}'), NAME),
    "control characters": (called('{"s": "\\u0000\\u001b\\u2028"}'), NAME),
    "line break in a string": (called('{"s": "a\nb"}'), NAME),
    "deep": (called('{"a": ' * 40 + "1" + "}" * 40), NAME),
    "unclosed": ('<tool_call>\n{"name": "save", "arguments": {"city": "Par', NAME),
    "broken": (called('{"city" = 1}'), NAME),
}
"""What the model writes, and what of it later prompts have."""
CUT = ("unclosed", "broken")
"""Arguments that are no JSON."""


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, engine: FakeEngine) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("model")
    models = ModelOptions(reasoning_parser="think", tool_call_parser="hermes")
    with responses_app(folder, engine, models=models, has_others=True) as app:
        yield app


Turn = Callable[[FastAPI, list[Any]], Awaitable[list[Any]]]
"""Asks for an answer to a history; what it and its results add to that."""


def asked(text: str = "hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


# Chat.

CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": NAME, "parameters": SCHEMA, "strict": True}}
]


def of_openai(app: FastAPI) -> Any:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(base_url="http://t/v1", api_key="k", max_retries=0, http_client=http)


def chat_turn(ask: Callable[[Any, dict[str, Any]], Awaitable[Any]]) -> Turn:
    async def turn(app: FastAPI, history: list[Any]) -> list[Any]:
        body = {"model": "tiny", "messages": history, "tools": CHAT_TOOLS}
        message = await ask(of_openai(app).chat.completions, body)
        calls = message["tool_calls"] if isinstance(message, dict) else message.tool_calls
        ids = [call["id"] if isinstance(call, dict) else call.id for call in calls or ()]
        results = [{"role": "tool", "tool_call_id": each, "content": "done"} for each in ids]
        return [message, *(results or [asked("and then?")])]

    return turn


async def chat_create(chat: Any, body: dict[str, Any]) -> Any:
    return (await chat.create(**body)).choices[0].message


async def chat_dumped(chat: Any, body: dict[str, Any]) -> Any:
    return (await chat.create(**body)).choices[0].message.model_dump()


async def chat_parse(chat: Any, body: dict[str, Any]) -> Any:
    return (await chat.parse(**body)).choices[0].message


async def chat_parse_dumped(chat: Any, body: dict[str, Any]) -> Any:
    return (await chat.parse(**body)).choices[0].message.model_dump()


async def chat_stream(chat: Any, body: dict[str, Any]) -> Any:
    async with chat.stream(**body) as stream:
        return (await stream.get_final_completion()).choices[0].message


async def chat_joined(chat: Any, body: dict[str, Any]) -> Any:
    """The deltas of a stream, put together by their indexes."""
    content, calls = "", dict[int, dict[str, Any]]()
    async for chunk in await chat.create(**body, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            if part.id:
                calls[part.index] = part.model_dump()
            else:
                calls[part.index]["function"]["arguments"] += part.function.arguments
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values()) or None}


# Responses.

RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": NAME, "parameters": SCHEMA, "strict": False, "description": "It."}
]


def response_turn(
    ask: Callable[[Any, dict[str, Any]], Awaitable[Any]], *, is_kept: bool = False
) -> Turn:
    async def turn(app: FastAPI, history: list[Any]) -> list[Any]:
        body: dict[str, Any] = {"model": "tiny", "input": history, "tools": RESPONSE_TOOLS}
        if is_kept and isinstance(history[0], str):
            body |= {"previous_response_id": history[0], "input": history[1:]}
        response = await ask(of_openai(app).responses, body)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
            for item in response.output
            if item.type == "function_call"
        ]
        added = results or [asked("and then?")]
        if is_kept:
            history[:] = [response.id]
            return added
        return [*response.output, *added]

    return turn


async def response_create(responses: Any, body: dict[str, Any]) -> Any:
    return await responses.create(**body)


async def response_parse(responses: Any, body: dict[str, Any]) -> Any:
    return await responses.parse(**body)


async def response_stream(responses: Any, body: dict[str, Any]) -> Any:
    async with responses.stream(**body) as stream:
        return await stream.get_final_response()


# Messages.


def message_turn(ask: Callable[[Any, dict[str, Any]], Awaitable[Any]]) -> Turn:
    async def turn(app: FastAPI, history: list[Any]) -> list[Any]:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        client = anthropic.AsyncAnthropic(
            base_url="http://t", api_key="k", max_retries=0, http_client=http
        )
        tools = [{"name": NAME, "input_schema": SCHEMA}]
        thinking = {"type": "adaptive"}
        body = {"model": "tiny", "max_tokens": 500, "messages": history}
        message = await ask(client.messages, {**body, "tools": tools, "thinking": thinking})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
            for block in message.content
            if block.type == "tool_use"
        ]
        answer = {"role": "assistant", "content": message.content}
        return [answer, {"role": "user", "content": results or "and then?"}]

    return turn


async def message_create(messages: Any, body: dict[str, Any]) -> Any:
    return await messages.create(**body)


async def message_stream(messages: Any, body: dict[str, Any]) -> Any:
    async with messages.stream(**body) as stream:
        return await stream.get_final_message()


async def message_parse(messages: Any, body: dict[str, Any]) -> Any:
    return await messages.parse(**body)


# Ollama.


def ollama_turn(ask: Callable[[Any, dict[str, Any]], Awaitable[list[Any]]]) -> Turn:
    async def turn(app: FastAPI, history: list[Any]) -> list[Any]:
        transport = httpx.ASGITransport(app)
        async with ollama.AsyncClient(host="http://t:80", transport=transport) as client:
            body = {"model": "tiny", "messages": history, "tools": CHAT_TOOLS, "think": True}
            messages = await ask(client, body)
        calls = [call for message in messages for call in message.tool_calls or ()]
        results = [{"role": "tool", "tool_name": NAME, "content": "done"} for _ in calls]
        return [*messages, *(results or [asked("and then?")])]

    return turn


async def ollama_chat(client: Any, body: dict[str, Any]) -> list[Any]:
    return [(await client.chat(**body)).message]


async def ollama_stream(client: Any, body: dict[str, Any]) -> list[Any]:
    """The messages of a stream as one."""
    parts = [part.message async for part in await client.chat(**body, stream=True)]
    return [
        ollama.Message(
            role="assistant",
            content="".join(part.content or "" for part in parts),
            thinking="".join(part.thinking or "" for part in parts),
            tool_calls=[call for part in parts for call in part.tool_calls or ()],
        )
    ]


async def ollama_pieces(client: Any, body: dict[str, Any]) -> list[Any]:
    """Those messages of a stream that have a call, as they came; of an answer without, one."""
    parts = [part.message async for part in await client.chat(**body, stream=True)]
    return [part for part in parts if part.tool_calls] or parts[:1]


TURNS: Mapping[str, Turn] = {
    "chat create": chat_turn(chat_create),
    "chat create, dumped": chat_turn(chat_dumped),
    "chat parse": chat_turn(chat_parse),
    "chat parse, dumped": chat_turn(chat_parse_dumped),
    "chat stream": chat_turn(chat_stream),
    "chat deltas joined": chat_turn(chat_joined),
    "responses create": response_turn(response_create),
    "responses parse": response_turn(response_parse),
    "responses stream": response_turn(response_stream),
    "responses kept": response_turn(response_create, is_kept=True),
    "messages create": message_turn(message_create),
    "messages stream": message_turn(message_stream),
    "messages parse": message_turn(message_parse),
    "ollama chat": ollama_turn(ollama_chat),
    "ollama stream": ollama_turn(ollama_stream),
    "ollama pieces": ollama_turn(ollama_pieces),
}


PARSING: Mapping[str, type[Exception]] = {
    **dict.fromkeys(
        ("chat parse", "chat parse, dumped", "chat stream"), openai.LengthFinishReasonError
    ),
    "responses stream": RuntimeError,  # it waits for an answer that is complete
}
"""What raises an error in the package, and which, where an answer is cut off."""
PAIRS = [
    (way, answer)
    for way in TURNS
    for answer in ANSWERS
    if not (way in PARSING and answer in CUT)
    and (way, answer) != ("chat parse, dumped", "huge number")  # the package writes no infinity
]


@pytest.mark.parametrize(("way", "answer"), PAIRS)
async def test_an_answer_goes_back(app: FastAPI, engine: FakeEngine, way: str, answer: str) -> None:
    engine.answer, in_prompt = ANSWERS[answer]
    history: list[Any] = [asked()]
    for turn in range(3):
        engine.submitted.clear()
        history += await TURNS[way](app, history)
        (request,) = engine.submitted.values()
        prompt = byte_tokenizer().decode(list(request.prompt_ids), skip_special_tokens=False)
        assert way == "ollama pieces" or prompt.count(in_prompt) >= turn


@pytest.mark.parametrize("answer", CUT)
@pytest.mark.parametrize("way", PARSING)
async def test_a_call_that_is_not_whole_is_no_call_to_a_parser(
    app: FastAPI, engine: FakeEngine, way: str, answer: str
) -> None:
    engine.answer, _ = ANSWERS[answer]
    with pytest.raises(PARSING[way]):
        await TURNS[way](app, [asked()])
