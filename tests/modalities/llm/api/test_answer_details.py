"""What answers hold beside their text: prompts, ids, stops and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.http import ANSWER, FakeEngine, chat, documents, in_process, make_service, refused
from support.text_models import CHATML
from triptych.core.http.app import create_app
from triptych.core.options.config import Config
from triptych.modalities.llm.api.routes import llm_router
from triptych.modalities.llm.api.unsupported import ROUTES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IM_END = 2


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 100, **fields}


async def ids_of(client: httpx.AsyncClient, prompt: str) -> list[int]:
    reply = await client.post("/tokenize", json={"prompt": prompt})
    return list(reply.json()["tokens"])


def ids_in(engine: FakeEngine, answer: str) -> list[int]:
    return [engine._ids[byte] for byte in answer.encode()]


async def test_ids_of_prompt_and_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = (await client.post(CHAT, json=chat(return_token_ids=True, n=2))).json()
    first, _ = engine.submitted.values()
    assert whole["prompt_token_ids"] == list(first.prompt_ids)
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == len(ANSWER)
    assert whole["choices"][0]["token_ids"] == ids_in(engine, ANSWER)
    plain = (await client.post(CHAT, json=chat())).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    done = (await client.post(TEXT, json=text(prompt=["a", "b"], return_token_ids=True))).json()
    for choice, prompt in zip(done["choices"], "ab", strict=True):
        assert choice["prompt_token_ids"] == await ids_of(client, prompt)
        assert choice["token_ids"] == ids_in(engine, ANSWER)


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
async def test_ids_in_a_stream(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    reply = await client.post(path, json={**body, "stream": True, "return_token_ids": True})
    chunks = [chunk for chunk in documents(reply.text) if chunk != "[DONE]"]
    holders = chunks if path == CHAT else [chunk["choices"][0] for chunk in chunks]
    (request,) = engine.submitted.values()
    prompts = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    assert prompts == [list(request.prompt_ids)], "once, at first"
    assert "prompt_token_ids" in holders[0]
    given = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert given == ids_in(engine, ANSWER)


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
async def test_log_probabilities_of_a_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    reply = (await client.post(path, json={**body, "prompt_logprobs": 1})).json()
    (request,) = engine.submitted.values()
    assert request.sampling.prompt_logprobs
    holder = reply if path == CHAT else reply["choices"][0]
    first, *rest = holder["prompt_logprobs"]
    assert first is None
    assert [list(each) for each in rest] == [[str(one)] for one in request.prompt_ids[1:]]
    for entry in rest:
        (value,) = entry.values()
        assert value.keys() == {"logprob", "rank", "decoded_token"}
        assert (value["logprob"], value["rank"]) == (-1.0, 1)
    assert "logprobs" not in reply["choices"][0] or reply["choices"][0]["logprobs"] is None
    none = (await client.post(path, json={**body, "prompt_logprobs": 0})).json()
    holder = none if path == CHAT else none["choices"][0]
    assert [len(each) for each in holder["prompt_logprobs"][1:]] == [1] * len(rest)


async def test_each_kind_of_log_probabilities_has_its_number(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = chat(prompt_logprobs=3, logprobs=True, top_logprobs=1)
    reply = (await client.post(CHAT, json=body)).json()
    (request,) = engine.submitted.values()
    assert request.sampling.top_logprobs == 3, "the engine finds as many as either wants"
    content = reply["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [1] * len(ANSWER)


async def test_tokens_by_their_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    reply = (await client.post(CHAT, json=chat(**asked))).json()
    content = reply["choices"][0]["logprobs"]["content"]
    ids = ids_in(engine, ANSWER)
    assert [each["token"] for each in content] == [f"token_id:{one}" for one in ids]
    assert content[0]["top_logprobs"][0]["token"] == f"token_id:{ids[0]}"
    done = text(logprobs=1, return_tokens_as_token_ids=True)
    logprobs = (await client.post(TEXT, json=done)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{one}" for one in ids]


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
async def test_stop_strings_are_shown_where_asked(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], is_shown: bool
) -> None:
    asked = {**body, "stop": ["fox"], "include_stop_str_in_output": is_shown, "logprobs": 1}
    if path == CHAT:
        asked["logprobs"] = True
    choice = (await client.post(path, json=asked)).json()["choices"][0]
    content = choice["message"]["content"] if path == CHAT else choice["text"]
    assert content == "The quick brown " + "fox" * is_shown
    assert choice["finish_reason"] == "stop"
    logprobs = choice["logprobs"]
    tokens = [each["token"] for each in logprobs["content"]] if path == CHAT else logprobs["tokens"]
    assert "".join(tokens) == content


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text(echo=True))])
async def test_special_tokens_are_shown_where_asked(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.answer = "ab"
    engine._ids[ord("b")] = IM_END
    if path == TEXT:
        body = {**body, "prompt": "<|im_end|>hi", "parse_special": True}
    seen = []
    for skips in (None, True, False):
        asked = body if skips is None else {**body, "skip_special_tokens": skips}
        choice = (await client.post(path, json=asked)).json()["choices"][0]
        seen.append(choice["message"]["content"] if path == CHAT else choice["text"])
    if path == CHAT:
        assert seen == ["a", "a", "a<|im_end|>"]
    else:
        assert seen == ["hia", "hia", "<|im_end|>hia<|im_end|>"]


@pytest.mark.parametrize("content", ["The answer is", [{"type": "text", "text": "The answer is"}]])
async def test_chat_echoes_the_assistants_last_message(
    client: httpx.AsyncClient, content: Any
) -> None:
    body = chat(echo=True, continue_final_message=True, add_generation_prompt=False)
    body["messages"] = [*body["messages"], {"role": "assistant", "content": content}]
    reply = (await client.post(CHAT, json=body)).json()
    assert reply["choices"][0]["message"]["content"] == "The answer is" + ANSWER
    stream = documents((await client.post(CHAT, json={**body, "stream": True})).text)
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in stream[:-1]]
    assert texts[:2] == ["", "The answer is"]
    assert "".join(filter(None, texts)) == "The answer is" + ANSWER
    plain = (await client.post(CHAT, json=chat(echo=True))).json()
    assert plain["choices"][0]["message"]["content"] == ANSWER, "the last message is the user's"


async def test_prompts_are_cut_where_asked(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    whole = await ids_of(client, "hello world")
    for prompt in ("hello world", whole):
        await client.post(TEXT, json=text(prompt=prompt, truncate_prompt_tokens=4, max_tokens=1))
    await client.post(TEXT, json=text(prompt="hi", truncate_prompt_tokens=400, max_tokens=1))
    cut = {"truncate_prompt_tokens": 4, "max_tokens": 1}
    for side in ("left", "right"):
        await client.post(TEXT, json=text(prompt=whole, truncation_side=side, **cut))
    first, second, short, left, right = engine.submitted.values()
    assert list(first.prompt_ids) == list(second.prompt_ids) == whole[-4:]
    assert [list(each.prompt_ids) for each in (left, right)] == [whole[-4:], whole[:4]]
    assert list(short.prompt_ids) == await ids_of(client, "hi")
    long = text(prompt="x" * 5000, max_tokens=7)
    error = refused(await client.post(TEXT, json=long))
    assert error["code"] == "context_length_exceeded"
    reply = await client.post(TEXT, json={**long, "truncate_prompt_tokens": -1})
    assert reply.json()["usage"]["prompt_tokens"] == 4096 - 7


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (TEXT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (CHAT, {"guided_json": True}, "guided_json"),
        (CHAT, {"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ],
)
async def test_what_cannot_be_is_named(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat(**fields) if path == CHAT else text(**fields)
    assert refused(await client.post(path, json=body))["param"] == param


async def test_a_template_is_applied(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "user", "content": "hi <|im_end|>"},
        {"role": "assistant", "content": "Well"},
    ]
    body = {"messages": messages, "continue_final_message": True}
    prompt = (await client.post("/apply-template", json=body)).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nWell")
    tools = [{"type": "function", "function": {"name": "look"}}]
    found = (await client.post("/apply-template", json={**body, "tools": tools})).json()["prompt"]
    assert json.dumps(tools[0]["function"]) in found
    for path in ("/tokenize", "/v1/tokenize"):
        counted = (await client.post(path, json={**body, "tools": tools})).json()
        assert counted["count"] > len(await ids_of(client, prompt))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    seen = {"messages": [{"role": "user", "content": [image]}]}
    assert refused(await client.post("/apply-template", json=seen))["param"] == "messages"


async def test_routes_of_the_tokenizer_go_by_the_first_model(client: httpx.AsyncClient) -> None:
    named = {"model": "tiny", "prompt": "hi"}
    assert (
        await ids_of(client, "hi")
        == (await client.post("/v1/tokenize", json=named)).json()["tokens"]
    )
    tokens = {"tokens": await ids_of(client, "hi")}
    for path in ("/detokenize", "/v1/detokenize"):
        assert (await client.post(path, json=tokens)).json() == {"prompt": "hi", "content": "hi"}
    unknown = {"model": "absent", "prompt": "hi"}
    assert refused(await client.post("/tokenize", json=unknown), 404)["code"] == "model_not_found"


async def test_the_tokens_of_a_conversation_are_counted(client: httpx.AsyncClient) -> None:
    asked = {"messages": [{"role": "user", "content": "hi there"}]}
    tokenized = (await client.post("/tokenize", json=asked)).json()
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        reply = await client.post(path, json={**asked, "model": "tiny"})
        assert reply.json() == {
            "object": "response.input_tokens",
            "input_tokens": tokenized["count"],
        }


@pytest.mark.parametrize(("path", "method"), [(path, ROUTES[path][0]) for path in ROUTES])
async def test_routes_of_other_servers_say_what_to_do(
    client: httpx.AsyncClient, path: str, method: str
) -> None:
    error = refused(await client.request(method, path))
    assert error["message"] == f"{path} is not offered: {ROUTES[path][1]}"


async def test_a_tokenizer_is_described_where_the_operator_wants_it(
    client: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    error = refused(await client.get("/tokenizer_info"), 404)
    assert "--enable-tokenizer-info-endpoint" in error["message"]
    folder = tmp_path / "described"
    folder.mkdir()
    service = make_service(folder, engine)
    app = create_app(Config(), engine, [llm_router(service, has_tokenizer_info=True)])
    async with in_process(app) as asking:
        found = (await asking.get("/tokenizer_info", params={"model": "tiny"})).json()
        assert found == (await asking.get("/tokenizer_info")).json()
        unknown = await asking.get("/tokenizer_info", params={"model": "absent"})
        assert refused(unknown, 404)["code"] == "model_not_found"
    assert found["chat_template"] == CHATML
    assert found["tokenizer_class"]
    assert not any(name.endswith("_file") for name in found)
