"""Requests of the text API: what is honoured, inert, refused or unknown."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.errors import InvalidRequest, TriptychError, UnsupportedOption
from triptych.core.limits import SAMPLING_RANGES
from triptych.modalities.llm.api.messages import Message
from triptych.modalities.llm.api.protocol import ChatRequest, CompletionRequest
from triptych.modalities.llm.api.tokenizer_protocol import TokenizeRequest
from triptych.modalities.llm.api.unsupported import CHAT, COMMON, COMPLETION

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(HELLO | fields)


def text(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate(TEXT | fields)


def refusal(request: Any, **fields: Any) -> TriptychError:
    """The error of ours behind pydantic's."""
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, TriptychError)
    return error


def test_every_field_openai_has_is_known_here() -> None:
    for kind, request, refused in (
        (chat_params.CompletionCreateParamsNonStreaming, ChatRequest, CHAT),
        (text_params.CompletionCreateParamsNonStreaming, CompletionRequest, COMPLETION),
    ):
        theirs = set(typing.get_type_hints(kind))
        assert theirs - request.model_fields.keys() - refused.keys() - COMMON.keys() == set()


def test_every_sampling_parameter_can_be_asked_for() -> None:
    internal = {"sample_index", "seed", "returns_state", "state_token_ids"}
    given = {*chat().sampling(), *text().sampling()}
    assert given == set(SamplingParams.__struct_fields__) - internal


@pytest.mark.parametrize("name", sorted(COMMON.keys() | CHAT.keys()))
def test_refused_fields_of_chat_name_the_alternative(name: str) -> None:
    error = refusal(chat, **{name: "something"})
    assert isinstance(error, UnsupportedOption)
    assert error.param == name
    assert error.message.startswith(f"{name} is not offered: ")
    assert error.message.endswith(".")


def test_best_of_is_refused() -> None:
    assert refusal(text, best_of=2).param == "best_of"
    assert text(best_of=2, n=2).best_of == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_special_tokens", False),
        ("mirostat", 0),
        ("typical_p", 1.0),
        ("provider", {}),
        ("verbosity", "medium"),
        *[(name, None) for name in (*COMMON, *CHAT)],
    ],
)
def test_values_that_ask_for_nothing_pass(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    "fields",
    [{"temperature": value} for value in (float("nan"), float("inf"), -0.1, 2.1, "1", True, [1])]
    + [
        {"repetition_penalty": 0},
        {"top_logprobs": 3},
        {"top_logprobs": 21, "logprobs": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": 5, "min_tokens": 6},
        {"max_completion_tokens": 5, "min_tokens": 6},
        {"max_tokens": -2},
        {"max_tokens": 5, "max_completion_tokens": 3, "min_tokens": 4},
        {"top_k": -2},
        {"repeat_penalty": 0},
        {"repeat_penalty": 1.1, "repetition_penalty": 1.2},
        {"continue_final_message": True, "add_generation_prompt": True},
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1025},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": {"5": float("nan")}},
        {"logit_bias": {str(n): 1 for n in range(1025)}},
        {"seed": 2**63},
        {"stream": 1},
        {"user": "x" * 513},
        {"metadata": {"k": "v" * 513}},
        {"metadata": {str(n): "" for n in range(17)}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"tools": "x"}},
        {"chat_template_kwargs": {"date_string": "<|im_end|>"}},
        {"model": ""},
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": "x", "name": "a b"}]},
        {"messages": HELLO["messages"] * 4097},
    ],
)
def test_what_is_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


@pytest.mark.parametrize("name", sorted(SAMPLING_RANGES.keys() - {"sample_index"}))
def test_both_ends_of_a_range_are_allowed(name: str) -> None:
    for value in SAMPLING_RANGES[name]:
        if name == "top_logprobs":
            assert chat(logprobs=True, top_logprobs=int(value))
        elif (name, value) != ("repetition_penalty", 0):
            assert chat(**{name: value})


def test_lists_of_mistakes_are_not_collected() -> None:
    with pytest.raises(ValidationError) as caught:
        chat(messages=[None] * 4000)
    assert caught.value.error_count() == 1
    with pytest.raises(ValidationError) as caught:
        text(prompt=[[None] * 1000] * 500)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("kind", ["input_image", "file", "video_url", "refusal"])
def test_parts_of_other_kinds_are_refused_by_name(kind: str) -> None:
    error = refusal(chat, messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert isinstance(error, UnsupportedOption)
    assert f"'image_file' and 'input_audio', not '{kind}'" in error.message


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
OTHER = {"type": "function", "function": {"name": "g"}}


def test_calls_in_a_message_stand_for_its_content() -> None:
    said = {"role": "assistant", "tool_calls": [CALL]}
    for message in (said, {**said, "content": None}, {**said, "content": ""}):
        (read,) = chat(messages=[message]).messages
        shown = read.for_template()
        assert shown["content"] == ""
        assert shown["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "text", ["{", '{"city": "Os', "[]", "5", "NaN", '{"a": NaN}', '{"a":' * 950 + "1" + "}" * 950]
)
def test_a_call_whose_arguments_are_no_object_goes_back_as_text(text: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    (read,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    (shown,) = read.for_template()["tool_calls"]
    assert shown["function"]["arguments"] == {"arguments": text}


@pytest.mark.parametrize(
    "text",
    ["", "{}", f'{{"n": {10**30}}}', '{"a": "\\ud83d"}', '{"a": 1, "a": 2}'],
)
def test_a_call_goes_back_as_the_object_it_was(text: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    (read,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    (shown,) = read.for_template()["tool_calls"]
    assert shown["function"]["arguments"] == json.loads(text or "{}")


def test_what_sdks_add_to_their_objects_is_taken_and_not_shown() -> None:
    function = {**CALL["function"], "parsed_arguments": {"a": 1}}  # type: ignore[dict-item]
    call = {**CALL, "index": 0, "function": function}
    message = {"role": "assistant", "content": "{}", "tool_calls": [call]}
    (plain,) = chat(messages=[{**message, "tool_calls": [CALL]}]).messages
    (dumped,) = chat(
        messages=[{**message, "parsed": {"b": [1]}, "id": "msg_1", "index": 3, "createdAt": 5}]
    ).messages
    assert dumped.for_template() == plain.for_template()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        *[
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", **bad}}]}
            for bad in ({}, {"arguments": {}})
        ],
    ],
)
def test_calls_that_are_none_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises((ValidationError, InvalidRequest)):
        chat(messages=[message])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": OTHER}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
                ]
            },
            "tools",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}
                ]
            },
            "messages",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused(fields: dict[str, Any], param: str) -> None:
    assert str(refusal(chat, **fields).param).startswith(param)


def test_tools_are_few() -> None:
    many = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(10_000)]
    with pytest.raises(ValidationError) as caught:
        chat(tools=many)
    assert caught.value.error_count() == 1


def test_messages_become_what_templates_know() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    shown = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert [message.for_template() for message in chat(messages=messages).messages] == [
        {"role": "system", "content": "d"},
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": ["a", "b"]},
        {"role": "assistant", "content": "c", "tool_calls": [shown]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, 1, [], [[]], ["a", 1], [1, "a"], [[1], 2], [1.5], [-1], [True, None], {}]
)
def test_other_forms_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        text(prompt=prompt)


def test_prompts_times_samples_are_bounded() -> None:
    assert refusal(text, prompt=["a"] * 512, n=2).param == "prompt"


def test_chat_has_its_own_words_for_length_and_logprobs() -> None:
    assert chat(max_completion_tokens=5).sampling()["max_tokens"] == 5
    assert chat(max_tokens=5).sampling()["max_tokens"] == 5
    assert chat().sampling()["top_logprobs"] is None
    assert chat(logprobs=True).sampling()["top_logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).sampling()["top_logprobs"] == 3
    assert text(logprobs=0, echo=True).sampling()["prompt_logprobs"] is True
    assert text(echo=True).sampling()["prompt_logprobs"] is False


def test_of_two_bounds_of_length_the_smaller_holds() -> None:
    for one, other in ((3, 9), (9, 3), (3, -1), (-1, 3), (3, None), (3, 3)):
        given = chat(max_tokens=one, max_completion_tokens=other).sampling()
        assert given["max_tokens"] == 3
    assert chat(max_tokens=-1, max_completion_tokens=-1).sampling()["max_tokens"] is None


def test_other_servers_spellings_are_honoured() -> None:
    assert chat(top_k=-1).sampling()["top_k"] == 0
    assert chat().sampling()["top_k"] is None
    assert chat(repeat_penalty=1.5).sampling()["repetition_penalty"] == 1.5
    assert chat(stop="").stops == ()


def test_tools_that_shall_not_be_called_pass() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert not chat(tools=tools, tool_choice="none").tool_set.tools
    assert len(chat(tools=tools).tool_set.tools) == 1
    assert chat(functions=tools, function_call="none") == chat()
    assert refusal(chat, functions=tools).param == "functions"


def test_what_no_answer_depends_on_is_let_pass() -> None:
    inert = {
        "cache_prompt": False,
        "chat_id": "c",
        "mirostat_eta": 0.1,
        "mirostat_tau": 5.0,
        "user": "u",
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert chat(**inert).sampling() == chat().sampling()


def test_marks_of_caches_are_not_shown_to_templates() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    part = {"type": "text", "text": "a"}
    reasoning = {"role": "assistant", "content": "b", "reasoning_content": "c"}
    messages = [{"role": "user", "content": [{**part, **mark}], **mark}, reasoning]
    shown = [message.for_template() for message in chat(messages=messages).messages]
    assert shown == [{"role": "user", "content": ["a"]}, reasoning]


def test_stops_and_biases_are_normalized() -> None:
    assert (chat().stops, chat(stop="a").stops, chat(stop=["a", "b"]).stops) == (
        (),
        ("a",),
        ("a", "b"),
    )
    assert chat(logit_bias={"7": -100}).sampling()["logit_bias"] == ((7, -100.0),)


def test_the_template_is_given_switches() -> None:
    options = chat(chat_template_kwargs={"enable_thinking": False}).template_options()
    assert options == {"enable_thinking": False, "add_generation_prompt": True}
    assert chat(add_generation_prompt=False).template_options()["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("fields", "switches"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"reasoning_effort": "low"}},
            {"enable_thinking": True, "reasoning_effort": "low"},
        ),
    ],
)
def test_reasoning_is_a_switch_of_the_template(
    fields: dict[str, Any], switches: dict[str, Any]
) -> None:
    assert chat(**fields).template_options() == {"add_generation_prompt": True, **switches}


def test_tokenize_takes_either_a_prompt_or_messages() -> None:
    for fields in ({}, {"prompt": "a", "messages": HELLO["messages"]}):
        assert refusal(
            lambda **given: TokenizeRequest.model_validate({"model": "m", **given}), **fields
        )


@pytest.mark.parametrize("name", ["add_special_tokens", "parse_special"])
def test_special_tokens_of_messages_are_the_templates_business(name: str) -> None:
    def tokenize(**given: Any) -> TokenizeRequest:
        return TokenizeRequest.model_validate({"model": "m", **given})

    assert refusal(tokenize, messages=HELLO["messages"], **{name: True}).param == name
    assert tokenize(prompt="a", **{name: True})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_comes_back_by_either_name(name: str) -> None:
    message = Message.model_validate({"role": "assistant", "content": "4.", name: "2 + 2"})
    assert message.for_template() == {
        "role": "assistant",
        "content": "4.",
        "reasoning_content": "2 + 2",
    }


def test_an_answer_as_litellm_gives_it_back_is_a_message() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    returned = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
    }
    (message,) = chat(messages=[returned]).messages
    assert message.for_template().keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_every_detail_of_openai_is_known(detail: str) -> None:
    url = {"url": "data:image/png;base64,AAAA", "detail": detail}
    content = [{"type": "image_url", "image_url": url}]
    messages = [{"role": "user", "content": content}]
    ChatRequest.model_validate({"model": "a", "messages": messages})
