"""The `openai` package against a live server: it must not notice the difference."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from support.http import ANSWER, FakeEngine, live, make_app, until
from triptych.core.errors import EngineDown, Overloaded, RateLimited
from triptych.core.http.server import HttpServer

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(tmp_path: Path, engine: FakeEngine) -> Iterator[HttpServer]:
    with live(make_app(tmp_path, engine, api_key=("key",))) as server:
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="key",
        max_retries=0,
        http_client=httpx.Client(verify=False),
    ) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HELLO, n=3, logprobs=True, top_logprobs=2, seed=1
    )
    assert reply.choices[0].message.content == ANSWER
    assert len(reply.choices) == 3
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content[:3]] == ["T", "h", "e"]
    assert len(logprobs.content[0].top_logprobs) == 2
    assert reply._request_id is not None


def test_its_own_answers_may_be_sent_back(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HELLO)
    history = [*HELLO, reply.choices[0].message, *HELLO]
    again = client.chat.completions.create(model="tiny", messages=history)
    assert again.usage is not None
    assert reply.usage is not None
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER)


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, echo=True, logprobs=1
    )
    assert [choice.text for choice in reply.choices] == ["aThe", "bThe"]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[-3:] == ["T", "h", "e"]


def test_fields_of_other_servers_clients(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = {"role": "assistant", "content": "So", "reasoning_content": "Hm."}
    reply = client.chat.completions.create(
        model="tiny",
        messages=[*HELLO, answer],
        max_tokens=-1,
        max_completion_tokens=3,
        stop="",
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        extra_body={
            "top_k": -1,
            "repeat_penalty": 1.1,
            "cache_prompt": True,
            "chat_id": "c",
            "enable_thinking": False,
            "continue_final_message": True,
            "usage": {"include": True},
        },
    )
    assert reply.choices[0].message.content == ANSWER[:3]
    (request,) = engine.submitted.values()
    assert request.sampling.repetition_penalty == 1.1
    with pytest.raises(openai.BadRequestError, match="--max-length"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"num_ctx": 8192})


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt="<|im_end|>",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"parse_special": True},
    )
    counts = [chunk.usage for chunk in stream]
    assert [use.completion_tokens for use in counts if use] == [1, 2, 3, 3, 3]
    assert all(use is not None and use.prompt_tokens == 1 for use in counts)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "triptych"


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (RateLimited("x"), openai.RateLimitError, "rate_limit_exceeded"),
        (Overloaded("x"), openai.InternalServerError, "overloaded"),
        (EngineDown("x"), openai.InternalServerError, "engine_down"),
        (RuntimeError("x"), openai.InternalServerError, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failures_have_the_types_of_openai(
    client: openai.OpenAI,
    engine: FakeEngine,
    error: Exception,
    kind: type[openai.APIStatusError],
    code: str,
    stream: bool,
) -> None:
    engine.error = error
    with pytest.raises(kind) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert caught.value.code == code
    assert caught.value.request_id


def test_mistakes_have_the_types_of_openai(client: openai.OpenAI, server: HttpServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="none", messages=HELLO)
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.BadRequestError, match="functions is not offered") as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, functions=[{"name": "f"}])
    assert refused.value.code == "unsupported_option"


def test_a_stream_that_breaks_raises(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error, engine.num_good = EngineDown("The engine died."), 3
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="The engine died"):
        list(stream)


def test_leaving_a_stream_cancels_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.is_endless, engine.step_s = True, 0.01
    with client.chat.completions.create(model="tiny", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    until(lambda: len(engine.cancelled) == 1)


def test_a_refusal_for_now_is_tried_again(server: HttpServer, engine: FakeEngine) -> None:
    engine.error = Overloaded("x", retry_after_s=0.5)
    timer = threading.Timer(0.3, setattr, (engine, "error", None))
    timer.start()
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="key", http_client=httpx.Client(verify=False)
    ) as client:
        reply = client.chat.completions.create(model="tiny", messages=HELLO)
    timer.join()
    assert reply.choices[0].message.content == ANSWER


async def test_many_at_once(server: HttpServer, engine: FakeEngine) -> None:
    engine.step_s = 0.001
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="key",
        http_client=httpx.AsyncClient(verify=False),
    ) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(*(one() for _ in range(32))) == [ANSWER] * 32
