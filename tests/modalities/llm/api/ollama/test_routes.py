"""Ollama's API over the whole app, in front of a made-up engine."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import ANSWER, READY, FakeEngine, in_process, make_service
from support.other_apis import DIALECTS, WEATHER_SCHEMA, other_apis_app
from support.text_models import byte_tokenizer
from triptych.core import limits
from triptych.core.engine_api.client import EngineStatus
from triptych.core.engine_api.model_changes import KeepModel
from triptych.core.engine_api.reports import Heartbeat, ModelStatus
from triptych.core.errors import EngineDown, RateLimited
from triptych.core.http.app import create_app
from triptych.core.options.config import Config
from triptych.core.process.metrics import DEVICE_INFO, series
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.llm.api.generation import chat_request
from triptych.modalities.llm.api.ollama.conversation import chat_fields
from triptych.modalities.llm.api.ollama.models import Catalogue
from triptych.modalities.llm.api.ollama.protocol import OllamaChatRequest
from triptych.modalities.llm.api.ollama.routes import ollama_router

CHAT = "/api/chat"
GENERATE = "/api/generate"
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "It.", "parameters": WEATHER_SCHEMA},
}
CALL_IDS = ("call00001", "call00002", "own")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "stream": False, **fields}


def prompt(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny:latest", "prompt": text, "stream": False, **fields}


def lines(reply: httpx.Response) -> list[Any]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


async def prompt_of(client: httpx.AsyncClient, engine: FakeEngine) -> str:
    """What the model was given last."""
    ids = list(list(engine.submitted.values())[-1].prompt_ids)
    body = {"model": "tiny", "tokens": ids, "skip_special_tokens": False}
    text: str = (await client.post("/detokenize", json=body)).json()["prompt"]
    return text


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_answer(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHAT, json=chat())).json()
    assert body["message"] == {"role": "assistant", "content": ANSWER}
    assert (body["model"], body["done"], body["done_reason"]) == ("tiny", True, "stop")
    assert (body["prompt_eval_count"], body["eval_count"]) == (21, len(ANSWER))
    datetime.fromisoformat(body["created_at"])
    assert body["created_at"].endswith("Z")


async def test_lines_are_the_default(client: httpx.AsyncClient) -> None:
    body = chat()
    del body["stream"]
    *pieces, last = lines(await client.post(CHAT, json=body))
    assert "".join(piece["message"]["content"] for piece in pieces) == ANSWER
    assert {piece["done"] for piece in pieces} == {False}
    assert len(pieces) > 10
    assert not any("eval_count" in piece for piece in pieces)
    assert (last["done"], last["message"]["content"]) == (True, "")
    assert last["eval_count"] == len(ANSWER)


async def test_durations_are_those_of_the_parts(tmp_path: Path) -> None:
    """Each is what the engine took, and all are within the whole."""
    engine = FakeEngine(answer="abcde", step_s=0.02)
    async with in_process(other_apis_app(tmp_path, engine)) as client:
        body = (await client.post(GENERATE, json=prompt())).json()
    total, load, prefill, decode = (body[name] for name in DURATIONS)
    assert prefill >= 0.02e9
    assert decode >= 4 * 0.02e9
    assert load + prefill + decode <= total


async def test_the_time_of_loading(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    async def load(model: str) -> None:
        loads.append(model)

    monkeypatch.setattr(engine, "load", load)
    await client.post(CHAT, json=chat())
    assert loads == ["tiny"]
    engine.state = with_tiny(state="ready")
    body = (await client.post(CHAT, json=chat())).json()
    assert (loads, body["load_duration"]) == (["tiny"], 0)


def with_tiny(device: str = "cpu", **status: Any) -> EngineStatus:
    models = (ModelStatus(model="tiny", **status),)
    held = {'triptych_device_memory_bytes{owner="tiny/weights"}': 100.0}
    held['triptych_device_memory_bytes{owner="tiny/kv"}'] = 20.0
    held['triptych_device_memory_bytes{owner="tiny2/kv"}'] = 3.0
    held[series(DEVICE_INFO, device=device)] = 1
    beat = Heartbeat(
        turn=1,
        phase="idle",
        stall_budget_s=1.0,
        num_jobs=0,
        models=models,
        gauges=held,
        counters={},
        histograms={},
    )
    values = {name: getattr(READY, name) for name in EngineStatus.__dataclass_fields__}
    return EngineStatus(**{**values, "models": models, "last_beat": beat})


async def test_what_was_asked_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
    }
    others = {"num_predict": 8, "repeat_penalty": 1.1, "num_gpu": 99, "num_thread": 2}
    body = chat(options={**options, **others}, keep_alive="5m")
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200
    assert engine.changes == [KeepModel("tiny", 300.0)]
    (request,) = engine.submitted.values()
    assert {name: getattr(request.sampling, name) for name in options} == options
    assert (request.sampling.max_tokens, request.sampling.repetition_penalty) == (8, 1.1)


@pytest.mark.parametrize(
    ("options", "num_tokens", "reason"),
    [
        ({"num_predict": 5}, 5, "length"),
        ({"num_predict": -1, "num_ctx": 31}, 10, "length"),
        ({"num_predict": 100_000, "num_ctx": 100_000}, len(ANSWER), "stop"),
        ({"stop": "quick"}, 9, "stop"),
        ({"stop": ["x", "quick"]}, 9, "stop"),
    ],
)
async def test_how_long_an_answer_is(
    client: httpx.AsyncClient, options: dict[str, Any], num_tokens: int, reason: str
) -> None:
    body = (await client.post(CHAT, json=chat(options=options))).json()
    assert (body["eval_count"], body["done_reason"]) == (num_tokens, reason)


async def test_a_prompt_over_num_ctx(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=chat(options={"num_ctx": 16}))
    assert reply.status_code == 400
    assert "context of 16" in reply.json()["error"]


async def test_calls_and_reasoning(thinker: httpx.AsyncClient) -> None:
    body = (await thinker.post(CHAT, json=chat(tools=[TOOL], think=True))).json()
    message = body["message"]
    assert (message["thinking"], message["content"]) == ("Hm, well.", "I look.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"index": n, "name": "get_weather", "arguments": {"city": "Paris"}} for n in range(2)
    ]
    assert body["done_reason"] == "stop"


async def test_calls_come_whole(thinker: httpx.AsyncClient) -> None:
    body = chat(tools=[TOOL], stream=True)
    *pieces, _ = [line["message"] for line in lines(await thinker.post(CHAT, json=body))]
    assert "".join(piece.get("thinking", "") for piece in pieces) == "Hm, well."
    assert "".join(piece["content"] for piece in pieces) == "I look."
    calls = [piece["tool_calls"] for piece in pieces if "tool_calls" in piece]
    assert [len(each) for each in calls] == [1, 1]


async def test_results_of_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """Calls have no ids there: each result is that of its tool's first call without one."""
    calls = [{"function": {"name": "f", "arguments": {"n": n}}} for n in (1, 2)]
    body = chat(tools=[{"type": "function", "function": {"name": "f"}}])
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "f", "tool_call_id": "of nobody", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    assert (await client.post(CHAT, json=body)).status_code == 200
    text = await prompt_of(client, engine)
    assert '{"name": "f", "arguments": {"n": 1}}' in text
    assert text.index("one") < text.index("two")


@pytest.mark.parametrize(
    ("results", "ids"),
    [
        ([{}, {}, {}], ["call00001", "call00002", "own"]),
        ([{"tool_name": "g"}, {}, {}], ["call00002", "call00001", "own"]),
        ([{"tool_call_id": "own"}, {"tool_name": "f"}, {}], ["own", "call00001", "call00002"]),
        ([{"tool_call_id": "call00001"}, {"tool_name": "f"}], ["call00001", "own"]),
    ],
)
async def test_whose_results_they_are(results: list[dict[str, str]], ids: list[str]) -> None:
    calls: list[dict[str, Any]] = [{"function": {"name": name}} for name in "fgf"]
    calls[2]["id"] = "own"
    body = chat()
    body["messages"] += [
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "x", **result} for result in results),
    ]
    said = chat_request(chat_fields(OllamaChatRequest.model_validate(body), "tiny")).messages
    assert [each.tool_call_id for each in said[2:]] == ids
    assert [each.name for each in said[2:]] == ["fgf"[CALL_IDS.index(each)] for each in ids]


async def test_parts_are_counted_before_any_is_validated(
    idle_app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONVERSATION_PARTS", 7)
    call = {"function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "tool_calls": [call, call, call, "no call"]}
    async with in_process(idle_app) as client:
        reply = await client.post(CHAT, json=chat(messages=[calls, calls]))
    assert (reply.status_code, "at most 7 parts" in reply.json()["error"]) == (400, True)


async def test_a_result_of_no_call_is_refused(idle_app: FastAPI) -> None:
    body = chat()
    body["messages"] += [{"role": "tool", "tool_name": "f", "content": "x"}]
    async with in_process(idle_app) as client:
        reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("messages: A message of role tool answers")


async def test_unwanted_reasoning_is_not_shown(thinker: httpx.AsyncClient) -> None:
    message = (await thinker.post(CHAT, json=chat(think=False))).json()["message"]
    assert "thinking" not in message
    assert message["content"].startswith("I look.")


async def test_errors_name_what_was_sent(client: httpx.AsyncClient) -> None:
    form = {"type": "string", "pattern": "("}
    error = (await client.post(CHAT, json=chat(format=form))).json()["error"]
    assert error.startswith("format: ")


async def test_a_file_in_a_schema_is_what_it_was(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    images = {"images": ["a", "A" * 700]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": images}}}
    reply = await client.post(CHAT, json=chat(tools=[tool]))
    assert reply.status_code == 200, reply.text
    assert "A" * 700 in await prompt_of(client, engine)


async def test_log_probabilities(client: httpx.AsyncClient) -> None:
    body = chat(logprobs=True, top_logprobs=2, options={"num_predict": 2})
    reply = (await client.post(CHAT, json=body)).json()
    assert [entry["token"] for entry in reply["logprobs"]] == ["T", "h"]
    assert len(reply["logprobs"][0]["top_logprobs"]) == 2
    streamed = lines(await client.post(CHAT, json={**body, "stream": True}))
    of_lines = [line for line in streamed if "logprobs" in line]
    tokens = [[entry["token"] for entry in line["logprobs"]] for line in of_lines]
    assert ["".join(each) for each in tokens] == [line["message"]["content"] for line in of_lines]
    assert [token for each in tokens for token in each] == ["T", "h"]


async def test_forms(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for form in ("json", WEATHER_SCHEMA, ""):
        assert (await client.post(CHAT, json=chat(format=form))).status_code == 200
    first, second, third = (request.grammar for request in engine.submitted.values())
    assert first
    assert second not in ("", first)
    assert not third


async def test_generate(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = (await client.post(GENERATE, json=prompt(system="Be brief."))).json()
    assert (body["response"], body["model"]) == (ANSWER, "tiny:latest")
    assert await prompt_of(client, engine) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_raw_prompt_is_the_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(GENERATE, json=prompt("a<|im_end|>b", raw=True))
    assert await prompt_of(client, engine) == "a<|im_end|>b"
    assert len(next(iter(engine.submitted.values())).prompt_ids) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_goes_on(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    context: list[int] = []
    for turn, text in enumerate(["hi", "and then?", "again"]):
        reply = await client.post(GENERATE, json=prompt(text, context=context, stream=stream))
        said = lines(reply) if stream else [reply.json()]
        end = said[-1]
        given = list(engine.submitted.values())[turn].prompt_ids
        assert given[: len(context)] == tuple(context)
        sampled = [byte_tokenizer().encode(char).ids[0] for char in ANSWER]
        assert end["context"] == [*given, *sampled]
        assert all("context" not in line for line in said[:-1])
        context = end["context"]
    raw = await client.post(GENERATE, json=prompt("a", raw=True, stream=False))
    assert "context" not in raw.json()


@pytest.mark.parametrize(("path", "empty"), [(CHAT, "message"), (GENERATE, "response")])
async def test_a_model_is_loaded(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, empty: str
) -> None:
    reply = await client.post(path, json={"model": "tiny", "keep_alive": -1})
    assert "x-triptych-ignored" not in reply.headers
    body = reply.json()
    assert (body["done"], body["done_reason"]) == (True, "load")
    assert empty in body
    for time in (0, "0", "0h0m", "-0.0s"):
        reply = await client.post(path, json={"model": "tiny", "keep_alive": time})
        assert reply.json()["done_reason"] == "unload"
        assert "x-triptych-ignored" not in reply.headers
    assert engine.unloaded == ["tiny"] * 4
    for time in ("1h30m", "-1s", ".5h", "300ms"):
        assert (await client.post(path, json={"model": "tiny", "keep_alive": time})).is_success
    kept_s = [change.idle_s for change in engine.changes if isinstance(change, KeepModel)]
    assert kept_s == [math.inf, 5400.0, math.inf, 1800.0, 0.3]
    for time in ("soon", "5", "5 m", "h", ""):
        refused = await client.post(path, json={"model": "tiny", "keep_alive": time})
        assert refused.json()["error"].startswith("keep_alive: "), time
    assert not engine.submitted


async def test_with_keys_an_admin_key_unloads_a_model(tmp_path: Path, engine: FakeEngine) -> None:
    app = other_apis_app(tmp_path, engine, api_key=("user",), admin_key=("boss",))
    body = {"model": "tiny", "keep_alive": 0}
    async with in_process(app) as client:
        refused = await client.post(CHAT, json=body, headers={"authorization": "Bearer user"})
        assert refused.status_code == 403
        assert "--admin-key" in refused.json()["error"]
        assert engine.unloaded == []
        reply = await client.post(CHAT, json=body, headers={"authorization": "Bearer boss"})
    assert (reply.status_code, reply.json()["done_reason"]) == (200, "unload")
    assert engine.unloaded == ["tiny"]


async def test_a_model_without_text_output_is_unloaded(tmp_path: Path, engine: FakeEngine) -> None:
    """Open WebUI ejects embedding models with the request for text models."""
    service = make_service(tmp_path, engine)
    words = ResolvedModel(name="words", reference="words", folder="", digest="")
    routers = [ollama_router(service, Catalogue([words], service))]
    body = {"model": "words:latest", "keep_alive": 0, "prompt": ""}
    async with in_process(create_app(Config(), engine, routers, dialects=DIALECTS)) as client:
        reply = await client.post(GENERATE, json=body)
        loaded = await client.post(GENERATE, json={**body, "keep_alive": "5m"})
    assert (reply.status_code, reply.json()["done_reason"]) == (200, "unload")
    assert (loaded.status_code, engine.unloaded) == (404, ["words"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, chat(options={"top_k": 40.5}), "options.top_k"),
        (CHAT, chat(options={"num_predict": 0}), "num_predict"),
        (CHAT, chat(options={"temperature": 9}), "options.temperature"),
        (CHAT, chat(options={"colour": 9}), "options.colour"),
        (CHAT, chat(options={"mirostat": 2}), "mirostat is not offered"),
        (CHAT, chat(options={"reasoning_effort": "low"}), "send think"),
        (CHAT, chat(options={"logit_bias": {"5": 1}}), "/v1/chat/completions"),
        (CHAT, chat(options={"repeat_last_n": 0}), "repeat_last_n 0 is not offered"),
        (CHAT, chat(think=True), "think"),
        (CHAT, chat(top_logprobs=2), "logprobs"),
        (CHAT, chat(messages=[{"role": "system", "content": "a", "images": ["AA"]}]), "images"),
        (CHAT, chat(messages=[{"role": "user", "content": "a", "tool_calls": [
            {"function": {"name": "f"}}]}]), "tool_calls"),
        (CHAT, chat(messages=[{"role": "tool", "content": "a"}]), "answers an earlier tool call"),
        (GENERATE, prompt(suffix="x"), "not trained to fill gaps"),
        (GENERATE, prompt(suffix="x", system="y"), "leave raw, system"),
        (GENERATE, prompt(template="x"), "--chat-template"),
        (GENERATE, prompt(context=[1], images=["AA"]), "/api/chat"),
        (GENERATE, prompt(context=[1], raw=True), "raw"),
        (GENERATE, prompt(context=[99999]), "Token ids lie between"),
        (GENERATE, prompt(raw=True, system="x"), "raw"),
        (GENERATE, prompt(width=512), "/v1/images/generations"),
        ("/api/show", {}, "model"),
        ("/api/show", {"model": "tiny", "name": "other"}, "name"),
        ("/api/show", {"model": "tiny", "verbose": True}, "verbose"),
        ("/api/pull", {"model": "llama3"}, "those of its start"),
        ("/api/create", {"model": "x", "from": "tiny"}, "Modelfile"),
        ("/api/copy", {}, "another name"),
        ("/api/push", {}, "published"),
        ("/api/blobs/sha256:00", {}, "--pull-folder"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_named(
    idle_app: FastAPI, path: str, body: Any, named: str
) -> None:
    async with in_process(idle_app) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json().keys() == {"error"}
    assert named in reply.json()["error"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_bodies_are_json_by_any_name(client: httpx.AsyncClient, kind: str) -> None:
    """Examples say nothing of a type; a web page can say what it likes, and is refused."""
    for path, body in ((CHAT, chat()), (GENERATE, prompt()), ("/api/show", {"model": "tiny"})):
        headers = {"content-type": kind}
        reply = await client.post(path, content=json.dumps(body), headers=headers)
        assert reply.status_code == 200, reply.text
        headers["origin"] = "https://example.com"
        refused = await client.post(path, content=json.dumps(body), headers=headers)
        assert refused.status_code == 403
        assert "another site" in refused.json()["error"]


@pytest.mark.parametrize(("error", "status"), [(RateLimited("x"), 429), (EngineDown("x"), 503)])
async def test_errors_are_words(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception, status: int
) -> None:
    engine.error = error
    reply = await client.post(CHAT, json=chat(stream=True))
    assert (reply.status_code, reply.json()) == (status, {"error": "x"})
    engine.num_good = 3
    assert lines(await client.post(CHAT, json=chat(stream=True)))[-1] == {"error": "x"}
    unknown = await client.post(CHAT, json={**chat(), "model": "llama3"})
    assert (unknown.status_code, unknown.json().keys()) == (404, {"error"})
    assert "tiny:latest" in unknown.json()["error"]
    assert (await client.get("/api/nothing")).json() == {"error": "There is no such route."}


async def test_the_models(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (model,) = (await client.get("/api/tags")).json()["models"]
    assert model["name"] == model["model"] == "tiny:latest"
    assert model["size"] > 4 * 6000
    assert model["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "6K",
        "quantization_level": "F32",
    }
    datetime.fromisoformat(model["modified_at"])
    assert (await client.get("/api/ps")).json() == {"models": []}
    engine.state = with_tiny(state="ready")
    (loaded,) = (await client.get("/api/ps")).json()["models"]
    assert (loaded["size"], loaded["size_vram"], loaded["context_length"]) == (120, 0, 4096)
    engine.state = with_tiny(device="gpu:0 (some GPU)", state="ready")
    (loaded,) = (await client.get("/api/ps")).json()["models"]
    assert (loaded["size"], loaded["size_vram"]) == (120, 120)
    version = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4), "what coding assistants ask for"
    pulled = await client.post("/api/pull", json={"model": "tiny"})
    assert [line["status"] for line in lines(pulled)] == ["pulling manifest", "success"]
    whole = await client.post("/api/pull", json={"model": "tiny", "stream": False})
    assert whole.json() == {"status": "success"}


async def test_a_reduced_context_is_shown_to_every_client(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state = with_tiny(state="ready", reduced_context=1000)
    (loaded,) = (await client.get("/api/ps")).json()["models"]
    assert loaded["context_length"] == 1000
    info = (await client.post("/api/show", json={"name": "tiny"})).json()["model_info"]
    assert info["llama.context_length"] == 1000
    version = {"anthropic-version": "2023-06-01"}
    assert (await client.get("/v1/models/tiny", headers=version)).json()["max_tokens"] == 1000
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == 1000


async def test_one_model(thinker: httpx.AsyncClient) -> None:
    shown = (await thinker.post("/api/show", json={"name": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert "add_generation_prompt" in shown["template"]
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 6000,
        "llama.context_length": 4096,
        "llama.vocab_size": 259,
    }


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("stream", [True, False])
async def test_hints_are_ignored_and_named(
    client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    body = (chat if path == CHAT else prompt)(
        *(() if path == CHAT else ("a",)),
        stream=stream,
        truncate=True,
        shift=None,
        options={"repeat_last_n": 64, "mirostat": 0, "draft_num_predict": 4},
    )
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    named = set(reply.headers["x-triptych-ignored"].split(", "))
    of_options = {"repeat_last_n", "draft_num_predict"}
    assert named == {"truncate", *(f"options.{name}" for name in of_options)}


async def test_labels_of_messages_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "a", "id": "m", "createdAt": "2026-11-28"}
    reply = await client.post(CHAT, json=chat(messages=[message]))
    assert reply.status_code == 200, reply.text
    named = set(reply.headers["x-triptych-ignored"].split(", "))
    assert named == {"messages.id", "messages.createdAt"}


@pytest.mark.parametrize("name", ["num_predict", "num_ctx", "seed", "top_k", "num_gpu"])
async def test_whole_floats_are_integers(client: httpx.AsyncClient, name: str) -> None:
    reply = await client.post(CHAT, json=chat(options={name: 40.0}))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
async def test_clients_that_look_for_ollama_find_it(client: httpx.AsyncClient, accept: str) -> None:
    for method in ("GET", "HEAD"):
        reply = await client.request(method, "/", headers={"accept": accept})
        assert reply.status_code == 200
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert reply.text == ("Ollama is running" if method == "GET" else "")


async def test_browsers_find_no_greeting(client: httpx.AsyncClient) -> None:
    headers = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    assert (await client.get("/", headers=headers)).status_code == 404
