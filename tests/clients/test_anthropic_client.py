"""The `anthropic` package against the app: it must not notice the difference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.http import ANSWER, FakeEngine
from support.other_apis import CALL, THINKS, WEATHER_SCHEMA, other_apis_app
from triptych.core.errors import EngineDown, Overloaded, RateLimited

anthropic = pytest.importorskip("anthropic", reason="part of the extra `test`")
httpx2 = pytest.importorskip("httpx2", reason="comes with anthropic")

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "get_weather", "input_schema": WEATHER_SCHEMA}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(answer=f"<think>Hm.</think>I look.\n{CALL}")


@pytest.fixture
async def client(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[Any]:
    app = other_apis_app(tmp_path, engine, models=THINKS, api_key=("key",))
    async with anthropic.AsyncAnthropic(
        base_url="http://t",
        api_key="key",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app)),
    ) as client:
        yield client


async def test_a_message(client: Any, engine: FakeEngine) -> None:
    engine.answer = ANSWER
    reply = await client.messages.create(
        model="tiny", max_tokens=100, messages=HELLO, system="Be brief.", stop_sequences=["lazy"]
    )
    assert reply.content[0].text == ANSWER.partition("lazy")[0]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "lazy")
    assert reply._request_id == reply.id.replace("msg_", "req-")


async def test_tools_there_and_back(client: Any, engine: FakeEngine) -> None:
    shared: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    asked = {"max_tokens": 200, **shared}
    reply = await client.messages.create(messages=HELLO, **asked)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    call = reply.content[-1]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sun"}
    history = [
        *HELLO,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    engine.answer = "It is sunny."
    last = await client.messages.create(messages=history, **asked)
    assert last.content[0].text == "It is sunny."
    count = await client.messages.count_tokens(messages=history, **shared)
    used = last.usage
    assert count.input_tokens == used.input_tokens + used.cache_read_input_tokens


async def test_a_stream_gives_the_same_message(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": HELLO,
        "tools": [TOOL],
        "thinking": {"type": "adaptive"},
    }
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "message_stop"} <= set(kinds)
    dumped = [message.model_dump(exclude_none=True) for message in (whole, streamed)]
    for message in dumped:
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert dumped[0] == dumped[1]


async def test_events_are_of_the_types_of_the_package(client: Any) -> None:
    stream = await client.messages.create(
        model="tiny", max_tokens=200, messages=HELLO, tools=[TOOL], stream=True
    )
    async for event in stream:
        type(event).model_validate(event.model_dump())


async def test_the_beta_client(client: Any, engine: FakeEngine) -> None:
    reply = await client.beta.messages.create(
        model="tiny",
        max_tokens=9,
        messages=HELLO,
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    assert reply.stop_reason == "max_tokens"


async def test_models(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).display_name == "tiny"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RateLimited("x"), "RateLimitError"),
        (Overloaded("x"), "OverloadedError"),
        (EngineDown("x"), "ServiceUnavailableError"),
        (RuntimeError("x"), "InternalServerError"),
    ],
)
async def test_errors_are_typed(
    client: Any, engine: FakeEngine, error: Exception, kind: str
) -> None:
    engine.error = error
    classes = vars(anthropic) | vars(anthropic._exceptions)
    with pytest.raises(classes[kind]) as raised:
        await client.messages.create(model="tiny", max_tokens=9, messages=HELLO)
    assert raised.value.body["type"] == "error"
    engine.num_good = 3
    with pytest.raises(anthropic.APIStatusError, match=r"x|internal"):
        async with client.messages.stream(model="tiny", max_tokens=9, messages=HELLO) as stream:
            await stream.until_done()


async def test_mistakes_are_typed(client: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 9, "messages": HELLO}
    with pytest.raises(anthropic.NotFoundError, match="tiny"):
        await client.messages.create(model="claude", **asked)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await client.messages.create(model="tiny", container="c", **asked)
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(model="tiny", **asked)
