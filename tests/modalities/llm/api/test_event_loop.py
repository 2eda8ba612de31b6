"""What takes long runs aside from the event loop, which answers everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from support.http import FakeEngine, chat, documents, in_process, make_app, refused
from support.responses_app import ask_for, responses_app
from support.threads import are_aside, threads_of
from triptych.core import limits
from triptych.core.http.body import StrictRoute
from triptych.core.limits import MAX_CONTENT_PARTS, MAX_MESSAGES
from triptych.modalities.llm.api import tokenizer_routes
from triptych.modalities.llm.api.messages import Message
from triptych.modalities.llm.api.replies import CompletionLogprobs
from triptych.modalities.llm.api.responses import answering, archive
from triptych.modalities.llm.api.responses import routes as responses_routes
from triptych.modalities.llm.api.samples import SampleText

COMPLETIONS = "/v1/completions"
PARTS = [{"role": "user", "content": [{"type": "text", "text": ""}] * MAX_CONTENT_PARTS}]
TURNS = [{"role": role, "content": "a"} for role in ("user", "assistant")] * (MAX_MESSAGES // 2)
PROMPT: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a" * 200,
    "echo": True,
    "logprobs": 3,
    "max_tokens": 2,
}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return make_app(tmp_path, FakeEngine())


@pytest.mark.parametrize("messages", [PARTS, TURNS])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/apply-template"])
async def test_conversations_of_many_parts(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, messages: list[Any], path: str
) -> None:
    validating = threads_of(monkeypatch, StrictRoute, "_validated")
    making = threads_of(monkeypatch, Message, "for_template")
    async with in_process(app) as client:
        await client.post(path, json={"model": "tiny", "messages": messages})
        assert are_aside(validating)
        assert are_aside(making)
        assert len(making) == len(messages)
        await client.post(path, json={"model": "tiny", "messages": chat()["messages"]})
    assert not are_aside(making), "the way to a thread takes longer"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/apply-template"])
async def test_parts_are_counted_before_any_is_validated(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(limits, "MAX_CONVERSATION_PARTS", 7)
    content: list[Any] = [{"type": "text", "text": ""}] * 4
    async with in_process(app) as client:
        for last in (content, [*content[:3], "no part"]):
            messages = [{"role": "user", "content": each} for each in ("a", content, last)]
            body = {"model": "tiny", "messages": messages}
            error = refused(await client.post(path, json=body))
            assert (error["param"], "at most 7 parts" in error["message"]) == ("messages", True)


async def test_an_echoed_prompt(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    telling = threads_of(monkeypatch, SampleText, "_score_prompt")
    writing = threads_of(monkeypatch, CompletionLogprobs, "model_construct")
    async with in_process(app) as client:
        whole = (await client.post(COMPLETIONS, json=PROMPT)).json()["choices"][0]
        assert are_aside(writing)
        reply = await client.post(COMPLETIONS, json={**PROMPT, "stream": True})
    assert len(telling) == 2
    assert are_aside(telling)
    choices = [each["choices"][0] for each in documents(reply.text) if each != "[DONE]"]
    assert choices[0]["text"].startswith(PROMPT["prompt"])
    assert "".join(each["text"] for each in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [one for each in choices for one in each["logprobs"][name]] == values


async def test_texts_of_many_tokens(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    telling = threads_of(monkeypatch, tokenizer_routes, "write_json")
    model = {"model": "tiny", "return_token_strs": True}
    async with in_process(app) as client:
        tokenized = (await client.post("/tokenize", json={**model, "prompt": "a" * 100})).json()
        assert (tokenized["count"], tokenized["token_strs"]) == (100, ["a"] * 100)
        monkeypatch.setattr("triptych.core.text.threads._SHORT_CHARS", 50)
        assert (
            await client.post("/tokenize", json={**model, "prompt": "a" * 100})
        ).json() == tokenized
    assert len(telling) == 2
    assert are_aside(telling[1:])


@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_a_long_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It says all log-probabilities several times, and they are kept once more."""
    places = (responses_routes, archive)
    writing = [threads_of(monkeypatch, place, "write_json") for place in places]
    answer = "word " * 50
    with responses_app(tmp_path, FakeEngine(answer=answer)) as app:
        async with in_process(app) as client:
            body = ask_for(top_logprobs=2, stream=stream)
            reply = await client.post("/v1/responses", json=body)
            last = documents(reply.text)[-1]["response"] if stream else reply.json()
            kept = (await client.get(f"/v1/responses/{last['id']}")).json()
    assert last == kept
    assert len(kept["output"][0]["content"][0]["logprobs"]) == len(answer)
    assert all(map(are_aside, writing))
    assert len(writing[0]) == (4 if stream else 1), "text, part, item and answer"


@pytest.mark.parametrize("num_items", [1, MAX_MESSAGES])
async def test_many_items_of_a_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_items: int
) -> None:
    understanding = threads_of(monkeypatch, answering, "_parse")
    part = {"type": "input_text", "text": ""}
    content: Any = [part] * MAX_CONTENT_PARTS if num_items == 1 else "a"
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            body = ask_for([{"role": "user", "content": content}] * num_items)
            await client.post("/v1/responses", json=body)
    assert are_aside(understanding)


async def test_the_description_of_the_api(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    making = threads_of(monkeypatch, app, "openapi")
    async with in_process(app) as client:
        first, again = [await client.get("/openapi.json") for _ in range(2)]
    assert first.json() == again.json()
    assert "/v1/chat/completions" in first.json()["paths"]
    assert len(making) == 1
    assert are_aside(making)
