"""Calls written as JSON that is not quite right, or that is no call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.read_calls import TIME, TOOLS, loaded, read
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.pieces import Answer

SAVE = '{"name": "get_time", "arguments": %s}'


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "line1\nline2\ttab"}', {"a": "line1\nline2\ttab"}),
        ('{"a": "say "hi" now"}', {"a": 'say "hi" now'}),
        ('{"a": True, "b": [False, None]}', {"a": True, "b": [False, None]}),
        ('{"a": [1, 2,], "b": {"c": 3,},}', {"a": [1, 2], "b": {"c": 3}}),
        ('{"a": "x" , "b" : "y"}', {"a": "x", "b": "y"}),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "mistral", "granite", "mistral-named", "kimi-k2"])
def test_json_that_models_often_get_wrong_is_mended(
    name: str, written: str, meant: dict[str, Any]
) -> None:
    around = {
        "hermes": "<tool_call>" + SAVE + "</tool_call>",
        "mistral": "[TOOL_CALLS] [" + SAVE + "]",
        "granite": "<|tool_call|>[" + SAVE + "]",
        "mistral-named": "[TOOL_CALLS]get_time[ARGS]%s",
        "kimi-k2": "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>%s"
        "<|tool_call_end|>",
    }
    text = around[name] % written
    answer = read(text, name)
    assert (answer.text, loaded(answer)) == ("", [("get_time", meant)])
    for size in (1, 2, 3, 7):
        assert read(text, name, range(0, len(text), size)) == answer


def test_brackets_too_many_are_dropped() -> None:
    for surplus in ("}", "}}", "]", " } ", ","):
        answer = read(f"<tool_call>{SAVE % '{}'}{surplus}</tool_call>\n", "hermes")
        assert (answer.text, loaded(answer)) == ("", [TIME])


def test_objects_in_one_mark_are_calls_each() -> None:
    calls = [SAVE % "{}", SAVE % '{"a": 1}']
    text = "<tool_call>\n{}\n{}\n</tool_call>So.".format(*calls)
    answer = read(text, "hermes")
    assert (answer.text, loaded(answer)) == ("So.", [TIME, ("get_time", {"a": 1})])


def test_of_arguments_that_come_twice_the_first_count() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {}, "arguments": {"a": 1}}</tool_call>'
    answer = read(text, "hermes")
    assert (answer.text, loaded(answer)) == ("", [TIME])


def test_of_names_that_come_twice_the_first_counts() -> None:
    text = '<tool_call>{"name": "get_time", "name": "other", "arguments": {}}</tool_call>'
    answer = read(text, "hermes")
    assert (answer.text, loaded(answer)) == ("", [TIME])


def test_arguments_in_a_text_are_read_no_deeper_than_others() -> None:
    deep = '{"a": ' * 65 + "1" + "}" * 65
    text = f'<tool_call>{{"name": "get_time", "arguments": {json.dumps(deep)}}}</tool_call>'
    answer = read(text, "hermes")
    assert (answer.text, answer.calls) == (text, [])


NO_CALLS = [
    '{"name": "get_time"}',
    '{"name": "get_time", "reason": "2 + 2 equals 4."}',
    '{"name": "get_time", "price": 3, "parts": [{}]}',
    '{"name": "get_time", "arguments": 5}',
    '{"name": "get_time", "arguments": "at noon"}',
    '{"name": "get_time", "parameters": ["a"]}',
    '{"reason": "", "name": "get_time"}',
]


@pytest.mark.parametrize("name", ["hermes", "llama3-json"])
@pytest.mark.parametrize("text", NO_CALLS)
def test_an_object_without_arguments_is_text(name: str, text: str) -> None:
    answer = read(text, name)
    assert (answer.text, answer.calls) == (text, [])


@pytest.mark.parametrize("name", ["hermes", "llama3-json"])
def test_json_is_the_answer_where_a_form_was_asked_for(name: str) -> None:
    parser = AnswerSyntax(name).parser(TOOLS, "", is_forced=False, has_form=True)
    answer = Answer.of([*parser.push(SAVE % "{}"), *parser.finish()])
    assert (answer.text, answer.calls) == (SAVE % "{}", [])
