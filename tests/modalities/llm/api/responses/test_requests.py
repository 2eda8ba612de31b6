"""What a request of the Responses API may say, and the chat request that it becomes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from support.http import FakeEngine, in_process, refused
from support.responses_app import ask_for, call_of, responses_app
from triptych.core.errors import InvalidRequest, Overloaded, UnknownModel
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.protocol import ChatRequest
from triptych.modalities.llm.api.responses import unsupported
from triptych.modalities.llm.api.responses.conversation import CHAT_NAMES, chat_fields
from triptych.modalities.llm.api.responses.items import KEPT_ITEM
from triptych.modalities.llm.api.responses.protocol import ResponseRequest
from triptych.modalities.llm.api.sampling_fields import SamplingFields
from triptych.modalities.llm.api.translation import rename_error
from triptych.modalities.llm.api.unsupported import IGNORED as IGNORED_BY_CHAT

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]}
TOOL = {"type": "function", "name": "f"}
IMAGE = {"type": "input_image", "image_url": "http://a/b.png"}
NAMESPACE = {"type": "namespace", "name": "mcp__n__", "description": "Of n.", "tools": [TOOL]}
NAMES = [{**TOOL, "name": f"f{number}"} for number in range(65)]


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def messages(*items: dict[str, Any], **fields: Any) -> Any:
    """What chat is asked for these items."""
    body = ResponseRequest.model_validate(ask_for(list(items), **fields))
    return chat_fields(body, [KEPT_ITEM.validate_python(item) for item in items])["messages"]


def test_items_become_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages(
        said("user", "a"), THOUGHT, said("assistant", "b"), CALL, RESULT, said("user", "c")
    ) == [
        said("user", "a"),
        {**said("assistant", "b"), "tool_calls": [call], "reasoning_content": "T"},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        said("user", "c"),
    ]


async def test_reasoning_is_asked_of_a_model_without(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            for effort, named in (("high", "reasoning.effort"), ("none", None)):
                body = ask_for(reasoning={"effort": effort, "summary": "auto"})
                reply = await client.post("/v1/responses", json=body)
                assert reply.headers.get("x-triptych-ignored") == named


def test_a_schema_needs_no_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    body = ResponseRequest.model_validate(ask_for("hi", text={"format": form}))
    asked = chat_fields(body, [])["response_format"]
    messages = [said("user", "a")]
    chat = ChatRequest.model_validate(
        {"model": "m", "messages": messages, "response_format": asked}
    )
    constraint = chat.constraint()
    assert constraint is not None
    assert json.loads(constraint.text) == schema


async def test_compaction_is_refused_by_name(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            error = refused(await client.post("/v1/responses/compact", json=ask_for()))
    assert error["code"] == "unsupported_option"
    assert "summary" in error["message"]


def test_switches_of_the_template_are_passed_on() -> None:
    switches = {"enable_thinking": False}
    body = ResponseRequest.model_validate(ask_for("hi", chat_template_kwargs=switches))
    assert chat_fields(body, [])["chat_template_kwargs"] == switches


def test_images_of_results_go_before_what_the_user_says_next() -> None:
    other = {**CALL, "call_id": "c2"}
    shown = {**RESULT, "output": [IMAGE, {"type": "input_text", "text": "Seen."}]}
    bare = {**RESULT, "call_id": "c2", "output": [IMAGE]}
    image = {"type": "image_url", "image_url": {"url": IMAGE["image_url"], "detail": "auto"}}
    first, *results = messages(CALL, other, shown, bare, said("user", "What is it?"))
    assert len(first["tool_calls"]) == 2
    assert results == [
        {"role": "tool", "tool_call_id": "c1", "content": "Seen."},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": [image, image, {"type": "text", "text": "What is it?"}]},
    ]
    alone = {"role": "user", "content": [image]}
    assert messages(CALL, shown)[2:] == [alone]
    roles = [message["role"] for message in messages(CALL, shown, other, bare)]
    assert roles == ["assistant", "tool", "user", "assistant", "tool", "user"]
    assert messages(CALL, shown, said("assistant", "b"))[2:] == [alone, said("assistant", "b")]


def test_answers_stay_apart() -> None:
    assert messages(said("assistant", "a"), said("assistant", "b"), CALL, THOUGHT) == [
        said("assistant", "a"),
        {**said("assistant", "b"), "tool_calls": [messages(CALL)[0]["tool_calls"][0]]},
        {**said("assistant", ""), "reasoning_content": "T"},
    ]


def test_a_call_that_breaks_off_is_left_out() -> None:
    broken = {**CALL, "arguments": '{"a', "status": "incomplete"}
    assert messages(said("user", "a"), broken) == [said("user", "a")]


def test_a_call_that_breaks_off_stays_if_its_client_answered_it() -> None:
    broken = {**CALL, "arguments": '{"a', "status": "incomplete"}
    answer, result = messages(broken, RESULT)
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"a'
    assert result["tool_call_id"] == "c1"


def test_what_the_operator_says_first_is_one_message() -> None:
    first = [said("developer", "b"), said("system", "c")]
    assert messages(*first, said("user", "d"), said("developer", "e"), instructions="a") == [
        said("system", "a\n\nb\n\nc"),
        said("user", "d"),
        said("developer", "e"),
    ]


def test_parts_of_a_message() -> None:
    url = "http://a/b.png"
    image = {"type": "input_image", "image_url": url, "detail": "original"}
    texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (message,) = messages({**said("user", ""), "content": [texts[0], image, texts[1]]})
    assert message["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "text", "text": "b"},
    ]
    (message,) = messages(
        {**said("user", ""), "content": [{"type": "input_image", "file_id": "file-1"}]}
    )
    kept = {"file_id": "file-1", "detail": "auto"}
    assert message["content"] == [{"type": "image_file", "image_file": kept}]
    refusal = {"type": "refusal", "refusal": "no"}
    answer = {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
    assert messages({**said("assistant", ""), "content": [answer, refusal]}) == [
        said("assistant", "bno")
    ]
    assert messages(CALL, {**RESULT, "output": texts})[-1]["content"] == "ab"


def test_the_other_fields() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = ResponseRequest.model_validate(
        ask_for(
            max_output_tokens=5,
            temperature=0.5,
            top_p=0.9,
            top_logprobs=2,
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": form, "verbosity": "medium"},
            tools=[{**TOOL, "description": None, "strict": False, "parameters": None}],
            tool_choice={"type": "function", "name": "f"},
            parallel_tool_calls=False,
        )
    )
    assert chat_fields(body, []) == {
        "model": "tiny",
        "messages": [],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "tools": [{"type": "function", "function": {"name": "f", "strict": False}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    }


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """An app for requests that are accepted."""
    with responses_app(tmp_path_factory.mktemp("app"), FakeEngine(answer="ok")) as app:
        yield app


@pytest.fixture(scope="module")
def idle() -> FakeEngine:
    """An engine that gets no job, since all requests are refused."""
    return FakeEngine()


@pytest.fixture(scope="module")
def refusing(idle: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    """An app for requests that are refused."""
    with responses_app(tmp_path_factory.mktemp("app"), idle) as app:
        yield app


NEUTRAL = [
    {name: value} for name, field in unsupported.REQUEST.items() for value in (None, *field.neutral)
]


@pytest.mark.parametrize(
    "fields",
    [
        *NEUTRAL,
        {"tools": [], "tool_choice": "none"},
        {"reasoning": {"context": "auto", "mode": "standard", "generate_summary": "concise"}},
        {"text": {}},
        {"text": {"format": {"type": "text"}}},
        {"stream_options": {"include_obfuscation": False}},
        {"include": ["reasoning.encrypted_content", "file_search_call.results"]},
        {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "service_tier": "flex"},
        {"max_tool_calls": 3, "prompt_cache_retention": "24h"},
        {"input": [{"type": "message", **said("user", "a"), "id": "x", "status": "completed"}]},
        {"input": [{**said("assistant", "a"), "phase": "final_answer"}, said("user", "b")]},
        {"input": [{**CALL, "id": "fc_1", "namespace": None, "caller": None}, RESULT]},
        {"input": [{**THOUGHT, "encrypted_content": "secret"}, said("user", "a")]},
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_accepted(answering: FastAPI, fields: dict[str, Any]) -> None:
    async with in_process(answering) as client:
        reply = await client.post("/v1/responses", json=ask_for(**fields))
    assert reply.status_code == 200, reply.text
    assert reply.json()["status"] == "completed"


UNLIKE_FUNCTIONS = ["computer_use_preview", "custom", "local_shell", "web_search_2031_01_01"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: "x"}, name) for name in unsupported.REQUEST),
        ({"repeat_last_n": 0}, "repeat_last_n"),
        ({"include_reasoning": False}, "include_reasoning"),
        *(({"tools": [{"type": kind}]}, "tools") for kind in UNLIKE_FUNCTIONS),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
        (
            {
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]},
                "tools": [{**TOOL, "name": "g"}],
            },
            "tool_choice",
        ),
        *(({"tool_choice": choice}, None) for choice in (5, [], True, {"type": 5})),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": []}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n" * 128, "tools": [TOOL]}]}, "tools"),
        ({"tools": [{**NAMESPACE, "tools": NAMES[:65]}, *NAMES[:64]]}, "tools"),
        ({"input": [{**CALL, "namespace": "n" * 128}, RESULT]}, "input"),
        ({"tools": [{**TOOL, "name": "n__f"}, {**NAMESPACE, "name": "n"}]}, "tools"),
        (
            {
                "tools": [{**NAMESPACE, "name": name} for name in "ab"],
                "tool_choice": {"type": "function", "name": "f"},
            },
            "tool_choice",
        ),
        ({"tools": [{**TOOL, "name": f"f{n}"} for n in range(10_000)]}, "tools"),
        ({"input": [said("user", "a")] * 5000}, "input"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "defer_loading"),
        ({"reasoning": {"mode": "pro"}}, "mode"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "strict": True}}}, "text.format"),
        (
            {
                "text": {
                    "format": {"type": "json_schema", "name": "n", "schema": {"type": "strange"}}
                }
            },
            "text.format",
        ),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0]"),
        ({"input": [{**said("user", ""), "content": [{"type": "input_file"}]}]}, None),
        ({"input": [{**said("system", ""), "content": [IMAGE]}]}, "input"),
        ({"input": [{**said("user", ""), "content": [{**IMAGE, "file_id": "f"}]}]}, "input"),
        ({"input": [CALL, {**RESULT, "output": [IMAGE]}]}, "input"),
        (
            {
                "input": [
                    {
                        **said("user", ""),
                        "content": [{**IMAGE, "image_url": "kept-picture:pic_1;image/png"}],
                    }
                ]
            },
            "input",
        ),
        ({"previous_response_id": "r", "conversation": "c"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, None),
        ({"temperature": 3.0}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"strange": 1}, "strange"),
        ({"n": 2}, "n"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused(
    refusing: FastAPI, idle: FakeEngine, fields: dict[str, Any], param: str | None
) -> None:
    async with in_process(refusing) as client:
        reply = await client.post("/v1/responses", json=ask_for(**fields))
    error = refused(reply)
    if param is not None:
        assert error["param"] is not None
        assert error["param"].endswith(param), error
    assert not idle.submitted


@pytest.mark.parametrize("differs", [{}, {"call_id": "c2"}])
async def test_a_result_without_its_call(tmp_path: Path, differs: dict[str, str]) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            before = [{**CALL, **differs}] if differs else []
            reply = await client.post("/v1/responses", json=ask_for([*before, RESULT, CALL]))
    error = refused(reply)
    assert error["param"] == "input"
    assert "function_call_output needs the call_id of an earlier function_call" in error["message"]


async def test_a_result_of_ten_megabytes(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine()) as app:
        async with in_process(app) as client:
            body = ask_for([CALL, {**RESULT, "output": "x" * 10**7}])
            refused(await client.post("/v1/responses", json=body), 413)


async def get(client: httpx.AsyncClient, path: str, **params: Any) -> httpx.Response:
    return await client.get(path, params=params)


async def test_what_is_asked_of_lists(tmp_path: Path) -> None:
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            name = (await client.post("/v1/responses", json=ask_for())).json()["id"]
            path = f"/v1/responses/{name}/input_items"
            empty = (await client.post("/v1/conversations", json={})).json()["id"]
            for params in (
                {"limit": 0},
                {"limit": 101},
                {"order": "up"},
                {"after": "none"},
                {"include": "everything"},
                {"include[]": "everything"},
            ):
                refused(await get(client, path, **params))
            for field in ("include", "include[]"):
                error = refused(await get(client, f"/v1/responses/{name}", **{field: "everything"}))
                assert error["param"] == f"{field}[0]"
                known = {field: "message.output_text.logprobs", "include_obfuscation": False}
                assert (await get(client, f"/v1/responses/{name}", **known)).status_code == 200
            refused(await get(client, f"/v1/responses/{name}", stream=True))
            refused(await get(client, f"/v1/responses/{name}", starting_after=3))
            nothing = (await get(client, f"/v1/conversations/{empty}/items")).json()
            refused(await client.post(f"/v1/conversations/{empty}/items", json={"items": []}))
            many = [said("user", "a")] * 21
            refused(await client.post("/v1/conversations", json={"items": many}))
    assert nothing == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_an_error_in_this_api_s_words_is_the_same_error() -> None:
    error = rename_error(UnknownModel.among(["tiny"], "voice"), CHAT_NAMES)
    assert isinstance(error, UnknownModel)
    assert error.name == "voice"
    late = rename_error(Overloaded("max_tokens", param="messages[1]", retry_after_s=5), CHAT_NAMES)
    assert (late.message, late.param, str(late)) == ("max_output_tokens", "input", late.message)
    assert late.retry_after_s == 5
    place = InvalidRequest("It is in messages[3].tool_calls[0] of these messages.")
    assert rename_error(place, CHAT_NAMES).message == "It is in input of these messages."


async def test_log_probabilities_are_of_the_words(tmp_path: Path) -> None:
    answer = "<think>\nHm.\n</think>\n\nI look." + call_of("f") + "Done."
    models = ModelOptions(reasoning_parser="think")
    with responses_app(tmp_path, FakeEngine(answer=answer), models=models) as app:
        async with in_process(app) as client:
            body = ask_for(tools=[TOOL], top_logprobs=1)
            output = (await client.post("/v1/responses", json=body)).json()["output"]
    texts = [item["content"][0] for item in output if item["type"] == "message"]
    assert texts
    for text in texts:
        tokens = "".join(entry["token"] for entry in text["logprobs"])
        assert tokens in text["text"]


GENERATING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "repeat_penalty": 1.2,
    "frequency_penalty": -1.0,
    "presence_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "min_tokens": 2,
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "priority": 1,
}


@pytest.mark.parametrize("name", SamplingFields.model_fields)
def test_sampling_is_chats(name: str) -> None:
    body = ResponseRequest.model_validate(ask_for("a", **{name: GENERATING[name]}))
    fields = chat_fields(body, [KEPT_ITEM.validate_python(said("user", "a"))])
    assert fields[name] == GENERATING[name]
    asked, plain = (ChatRequest.model_validate(each) for each in (fields, {**fields, name: None}))
    assert asked != plain
    assert getattr(asked, name) == GENERATING[name]


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object"}},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
    ],
)
def test_a_form_is_chats(form: dict[str, Any]) -> None:
    body = ResponseRequest.model_validate(ask_for("a", structured_outputs=form))
    fields = chat_fields(body, [KEPT_ITEM.validate_python(said("user", "a"))])
    given = ChatRequest.model_validate(fields).constraint()
    messages = {"model": "m", "messages": fields["messages"]}
    assert given is not None
    assert given == ChatRequest.model_validate(messages | {"structured_outputs": form}).constraint()


async def test_two_forms_are_refused_by_the_names_of_this_api(tmp_path: Path) -> None:
    text = {"format": {"type": "json_object"}}
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            body = ask_for("a", text=text, structured_outputs={"regex": "a"})
            error = refused(await client.post("/v1/responses", json=body))
    assert error["message"].endswith("text.format and structured_outputs are two.")


@pytest.mark.parametrize(("asked", "replied"), [({}, 0.0), ({"presence_penalty": 0}, 0.0), ({
    "presence_penalty": 1.5}, 1.5)])  # fmt: skip
async def test_penalties_are_in_the_answer(
    tmp_path: Path, asked: dict[str, Any], replied: float
) -> None:
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            reply = await client.post("/v1/responses", json=ask_for("a", **asked))
    assert reply.status_code == 200, reply.text
    assert (reply.json()["presence_penalty"], reply.json()["frequency_penalty"]) == (replied, 0.0)


@pytest.mark.parametrize("name", sorted({*unsupported.IGNORED, *IGNORED_BY_CHAT}))
async def test_hints_are_ignored_and_named(tmp_path: Path, name: str) -> None:
    with responses_app(tmp_path, FakeEngine(answer="ok")) as app:
        async with in_process(app) as client:
            reply = await client.post("/v1/responses", json=ask_for("a", **{name: {"a": "b"}}))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-triptych-ignored"] == name
