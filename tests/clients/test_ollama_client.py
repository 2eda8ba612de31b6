"""The `ollama` package against the app: it must not notice the difference."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import ANSWER, FakeEngine
from support.other_apis import CALL, THINKS, other_apis_app

ollama = pytest.importorskip("ollama", reason="part of the extra `test`")

HELLO = [{"role": "user", "content": "hi"}]


def get_weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: Its name.
    """
    return f"Sun in {city}"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(answer=f"<think>Hm.</think>I look.\n{CALL}")


@pytest.fixture
async def client(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[Any]:
    app = other_apis_app(tmp_path, engine, models=THINKS)
    async with ollama.AsyncClient(host="http://t:80", transport=httpx.ASGITransport(app)) as client:
        yield client


async def test_chat(client: Any, engine: FakeEngine) -> None:
    engine.answer = ANSWER
    reply = await client.chat(model="tiny", messages=HELLO, options={"num_predict": 9})
    assert (reply.message.content, reply.done_reason) == (ANSWER[:9], "length")
    assert reply.total_duration >= reply.prompt_eval_duration > 0
    stream = await client.chat(model="tiny:latest", messages=HELLO, stream=True)
    assert "".join([part.message.content async for part in stream]) == ANSWER


async def test_tools_there_and_back(client: Any, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"model": "tiny", "tools": [get_weather], "think": True}
    reply = await client.chat(messages=HELLO, **asked)
    assert (reply.message.thinking, reply.message.content) == ("Hm.", "I look.")
    (call,) = reply.message.tool_calls
    result = get_weather(**call.function.arguments)
    engine.answer = "It is sunny."
    tool_message = {"role": "tool", "tool_name": "get_weather", "content": result}
    history = [*HELLO, reply.message, tool_message]
    last = await client.chat(messages=history, **asked)
    assert last.message.content == "It is sunny."


async def test_generate(client: Any, engine: FakeEngine) -> None:
    engine.answer = ANSWER
    assert (await client.generate(model="tiny", prompt="hi")).response == ANSWER
    stream = await client.generate(model="tiny", prompt="hi", stream=True, raw=True)
    assert "".join([part.response async for part in stream]) == ANSWER
    assert (await client.generate(model="tiny")).done_reason == "load"


async def test_the_models(client: Any) -> None:
    (model,) = (await client.list()).models
    shown = await client.show(model.model)
    assert shown.details.family == model.details.family == "llama"
    assert "thinking" in shown.capabilities
    assert (await client.ps()).models == []
    assert (await client.pull("tiny")).status == "success"


async def test_errors(client: Any, engine: FakeEngine) -> None:
    for asking, status, words in (
        (client.chat(model="llama3", messages=HELLO), 404, "tiny:latest"),
        (client.pull("llama3"), 400, "those of its start"),
        (client.delete("tiny"), 400, "those of its start"),
        (client.create("x", from_="tiny"), 400, "not offered"),
        (client.generate(model="tiny", prompt="a", suffix="b"), 400, "suffix"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as raised:
            await asking
        assert raised.value.status_code == status
    engine.error, engine.num_good = RuntimeError("x"), 3
    with pytest.raises(ollama.ResponseError, match="internal error"):
        [part async for part in await client.chat(model="tiny", messages=HELLO, stream=True)]
