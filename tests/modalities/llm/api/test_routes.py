"""The text API over the whole app, in front of a made-up engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import ANSWER, FakeEngine, chat, documents, in_process, make_app, refused
from triptych.core.engine_api.tokens import TokenLogprob, TokenRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def text(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def test_a_chat_answer(client: httpx.AsyncClient) -> None:
    reply = (await client.post(CHAT, json=chat())).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["system_fingerprint"].startswith("fp_")
    (choice,) = reply["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert reply["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": len(ANSWER),
        "total_tokens": 21 + len(ANSWER),
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_samples_share_a_prompt_in_the_counts(client: httpx.AsyncClient) -> None:
    reply = (await client.post(CHAT, json=chat(n=3, max_tokens=2))).json()
    contents = [choice["message"]["content"] for choice in reply["choices"]]
    assert contents == [ANSWER[:2], ANSWER[1:3], ANSWER[2:4]]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 3
    assert reply["usage"]["prompt_tokens"] == 21
    assert reply["usage"]["completion_tokens"] == 6


async def test_what_was_asked_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "n": 2,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "logit_bias": {"5": 1},
        "stop_token_ids": [9],
        "min_tokens": 2,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 4,
        "priority": 3,
    }
    assert (await client.post(CHAT, json=chat(**fields))).status_code == 200
    first, second = engine.submitted.values()
    sampling = first.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"):
        assert getattr(sampling, name) == fields[name]
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.2, -0.2)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.top_logprobs) == (2, 8, 4)
    assert sampling.logit_bias == ((5, 1.0),)
    assert {0, 2, 9} == set(sampling.stop_token_ids)  # the model's own ends, too
    assert [row.sampling.sample_index for row in (first, second)] == [0, 1]
    assert first.priority == -3, "lower values run first"


async def test_ignore_eos_leaves_only_the_callers_ends(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(CHAT, json=chat(ignore_eos=True, stop_token_ids=[9]))
    (request,) = engine.submitted.values()
    assert request.sampling.stop_token_ids == (9,)


async def test_without_a_limit_chat_may_fill_the_context(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post(CHAT, json=chat())
    await client.post(TEXT, json=text())
    in_chat, in_text = engine.submitted.values()
    assert in_chat.sampling.max_tokens == 4096 - 21
    assert in_text.sampling.max_tokens == 16


async def test_developer_role_becomes_system(client: httpx.AsyncClient) -> None:
    tokens = []
    for role in ("developer", "system"):
        body = {"model": "tiny", "messages": [{"role": role, "content": "x"}]}
        tokens.append((await client.post("/tokenize", json=body)).json()["tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string_ends_the_answer(client: httpx.AsyncClient, stream: bool) -> None:
    reply = await client.post(CHAT, json=chat(stop=[" brown", "zzz"], stream=stream))
    if stream:
        choices = [event["choices"][0] for event in documents(reply.text)[:-1]]
        content = "".join(choice["delta"].get("content", "") for choice in choices)
        finish = choices[-1]["finish_reason"]
    else:
        content = reply.json()["choices"][0]["message"]["content"]
        finish = reply.json()["choices"][0]["finish_reason"]
    assert (content, finish) == ("The quick", "stop")


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    body = chat(logprobs=True, top_logprobs=2, max_tokens=2)
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["T", "h"]
    assert whole["content"][0] == {
        "token": "T",
        "bytes": [84],
        "logprob": -0.25,
        "top_logprobs": [
            {"token": "T", "bytes": [84], "logprob": -0.25},
            {"token": "S", "bytes": [83], "logprob": -1.25},
        ],
    }
    streamed = documents((await client.post(CHAT, json=body | {"stream": True})).text)
    entries = [
        entry
        for event in streamed[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == whole["content"]


async def test_usage_comes_as_a_chunk_of_its_own_where_asked(client: httpx.AsyncClient) -> None:
    for path, body in ((CHAT, chat()), (TEXT, text())):
        body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        *events, usage, done = documents((await client.post(path, json=body)).text)
        assert done == "[DONE]"
        assert all(event["usage"] is None for event in events)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_usage_comes_always_where_the_operator_wants_it(tmp_path: Path) -> None:
    app = make_app(tmp_path, FakeEngine(), enable_force_include_usage=True)
    async with in_process(app) as client:
        for path, body in ((CHAT, chat()), (TEXT, text())):
            reply = await client.post(path, json={**body, "stream": True, "max_tokens": 3})
            *_, usage, _ = documents(reply.text)
            assert usage["usage"]["completion_tokens"] == 3


async def test_samples_of_a_stream_have_their_index(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=chat(n=3, stream=True, max_tokens=4))
    texts = {0: "", 1: "", 2: ""}
    roles = []
    for event in documents(reply.text)[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
    assert texts == {0: ANSWER[:4], 1: ANSWER[1:5], 2: ANSWER[2:6]}
    assert sorted(roles) == [0, 1, 2]


async def test_several_prompts_and_samples_are_numbered(client: httpx.AsyncClient) -> None:
    body = text(["a", "bc"], n=2, max_tokens=2, echo=True)
    reply = (await client.post(TEXT, json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "aTh"),
        (1, "ahe"),
        (2, "bcTh"),
        (3, "bche"),
    ]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 8


async def test_token_ids_are_a_prompt_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(TEXT, json=text([5, 6]))
    await client.post(TEXT, json=text([[5, 6], [7]]))
    prompts = [request.prompt_ids for request in engine.submitted.values()]
    assert prompts == [(5, 6), (5, 6), (7,)]


async def test_token_ids_beyond_the_vocabulary_are_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post(TEXT, json=text([5, 99999]))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [True, False])
async def test_completion_logprobs_with_echo(client: httpx.AsyncClient, stream: bool) -> None:
    body = text("hi", echo=True, logprobs=1, max_tokens=2, stream=stream)
    reply = await client.post(TEXT, json=body)
    parts = [reply.json()] if not stream else documents(reply.text)[:-1]
    merged: dict[str, list[Any]] = {}
    for part in parts:
        for name, values in part["choices"][0]["logprobs"].items():
            merged.setdefault(name, []).extend(values)
    assert merged == {
        "tokens": ["h", "i", "T", "h"],
        "token_logprobs": [None, -1.0, -0.25, -0.25],
        "top_logprobs": [None, {"i": -1.0}, {"T": -0.25}, {"h": -0.25}],
        "text_offset": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_a_prompt_is_scored_without_an_answer(
    client: httpx.AsyncClient, stream: bool, logprobs: int | None
) -> None:
    body = text(["hi", "abc"], echo=True, logprobs=logprobs, max_tokens=0, n=2, stream=stream)
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    reply = await client.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    parts = documents(reply.text)[:-1] if stream else [reply.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    said: dict[int, str] = {}
    for choice in choices:
        said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
        assert not choice["token_ids"]
    assert said == {0: "hi", 1: "hi", 2: "abc", 3: "abc"}
    scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [entry["tokens"] for entry in scored] == (
        [] if logprobs is None else [list("hi"), list("hi"), list("abc"), list("abc")]
    )
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    usage = parts[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)


async def test_no_answer_needs_an_echo(client: httpx.AsyncClient) -> None:
    error = refused(await client.post(TEXT, json=text("hi", max_tokens=0)))
    assert error["param"] == "max_tokens"
    assert "max_tokens" in error["message"]
    assert "echo" in error["message"]


async def test_a_token_comes_before_those_that_are_likelier(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients take the first for the token itself."""

    def likelier(request: TokenRequest) -> tuple[TokenLogprob, ...]:
        ids = request.prompt_ids[1:]
        return tuple(TokenLogprob(token, -1.0, ((token + 1, -0.5),)) for token in ids)

    monkeypatch.setattr("support.http._prompt_logprobs", likelier)
    body = text("hi", echo=True, logprobs=1, max_tokens=1)
    (choice,) = (await client.post(TEXT, json=body)).json()["choices"]
    assert list(choice["logprobs"]["top_logprobs"][1].items()) == [("i", -1.0), ("j", -0.5)]


async def test_the_token_sampled_is_always_among_the_likeliest(client: httpx.AsyncClient) -> None:
    reply = await client.post(TEXT, json=text("hi", logprobs=0, max_tokens=1))
    assert reply.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"T": -0.25}]


async def test_models_are_listed_and_shown(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 4096)
    assert card["task"] == "chat"
    assert (await client.get("/v1/models/tiny")).json() == card
    assert (await client.get("/v1/models/org/none")).status_code == 404


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_model_that_is_not_here_is_not_found(client: httpx.AsyncClient, path: str) -> None:
    bodies = {CHAT: chat(), TEXT: text(), "/tokenize": text(), "/detokenize": {"tokens": [5]}}
    reply = await client.post(path, json=bodies[path] | {"model": "gpt-9"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "model")
    assert "tiny" in reply.json()["error"]["message"]


async def test_tokens_there_and_back(client: httpx.AsyncClient) -> None:
    tokenized = (await client.post("/tokenize", json=text("héllo"))).json()
    assert tokenized["count"] == len(tokenized["tokens"]) == 6
    assert tokenized["max_model_len"] == 4096
    body = {"model": "tiny", "tokens": tokenized["tokens"]}
    found = (await client.post("/detokenize", json=body)).json()
    assert found == {"prompt": "héllo", "content": "héllo"}
    for wrong in ([-1], [2**31], [9999], ["a"], None):
        reply = await client.post("/detokenize", json=body | {"tokens": wrong})
        assert reply.status_code == 400


async def test_a_conversation_is_counted_as_the_model_reads_it(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = chat("héllo")
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    await client.post(CHAT, json=body)
    (request,) = engine.submitted.values()
    assert request.prompt_ids == tuple(tokens)
    shorter = await client.post("/tokenize", json=body | {"add_generation_prompt": False})
    assert shorter.json()["count"] < len(tokens)


@pytest.mark.parametrize("stream", [True, False])
async def test_hints_are_ignored_and_named(client: httpx.AsyncClient, stream: bool) -> None:
    hints = {"include_reasoning": True, "provider": {"order": ["a"]}, "id_slot": None}
    reply = await client.post("/v1/chat/completions", json=chat(stream=stream, **hints))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == "include_reasoning, provider"
    plain = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert "x-triptych-ignored" not in plain.headers
    wrong = await client.post("/v1/chat/completions", json=chat(include_reasonings=True))
    assert wrong.status_code == 400


@pytest.mark.parametrize(("name", "value"), [("repeat_last_n", 0), ("include_reasoning", False)])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_values_of_hints_that_change_an_answer_are_refused(
    client: httpx.AsyncClient, path: str, name: str, value: object
) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "a"}
    reply = await client.post(path, json={**body, name: value})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_option")
    assert reply.json()["error"]["param"] == name


async def test_labels_of_messages_are_ignored_and_named_once(client: httpx.AsyncClient) -> None:
    turns = [{"role": role, "content": "x", "id": "a"} for role in ("user", "assistant", "user")]
    body = chat(messages=[{**turns[0], "timestamp": 5, "metadata": None}, *turns[1:]])
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == "messages.id, messages.timestamp"
    for wrong in ({**turns[0], "prefix": True}, {"role": "user", "id": "a"}):
        assert (await client.post(CHAT, json=chat(messages=[wrong]))).status_code == 400


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}])
async def test_no_alternatives_need_no_logprobs(
    client: httpx.AsyncClient, logprobs: dict[str, bool]
) -> None:
    reply = await client.post("/v1/chat/completions", json=chat(top_logprobs=0, **logprobs))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"enable_thinking": True, "thinking_budget": 5}, "enable_thinking, thinking_budget"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"enable_thinking": False, "reasoning_effort": "none", "thinking": False}, None),
    ],
)
async def test_reasoning_is_asked_of_a_model_without(
    client: httpx.AsyncClient, fields: dict[str, Any], named: str | None
) -> None:
    reply = await client.post(CHAT, json=chat(**fields))
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-triptych-ignored") == named
