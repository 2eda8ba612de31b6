"""Answers with calls and reasoning, in every family's format, however the text is cut."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.read_calls import PARIS, TIME, TOOLS, loaded, read
from triptych.core.options.config import ModelOptions
from triptych.modalities.llm.api.tools.formats import (
    ALIASES,
    CALL_FORMATS,
    REASONING_FORMATS,
    AnswerSyntax,
    call_format_of,
    reasoning_format_of,
)
from triptych.modalities.llm.api.tools.parser import AnswerParser
from triptych.modalities.llm.api.tools.pieces import Answer, ToolUse


def deepseek(text: str) -> str:
    return text.replace("<tool", "<\uff5ctool").replace("_>", "\uff5c>").replace("_", "\u2581")


# Turns of an assistant as the models' published chat templates write them, or tell models to: those
# of Qwen 2.5 and 3, Granite 3 and 4, Phi-4-mini, Mistral Small 3.1 and Nemo, Llama 3.1, 3.2 and 4,
# Qwen3-Coder, GLM-4.5, Seed-OSS, DeepSeek V3 and V3.1, Kimi K2; vLLM's for Llama's Python; OpenAI's
# description of harmony. The rest is what these models write instead.
ANSWERS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        "I look.",
        [PARIS, TIME],
    ),
    (
        "hermes",
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '{"name": "get_time", "arguments": null}\nSo.',
        "So.",
        [PARIS, TIME],
    ),
    ("hermes", '```json\n{"name": "get_time", "arguments": {}}\n```', "", [TIME]),
    ("hermes", '<tools>\n{"name": "get_time", "arguments": {}}\n</tools>', "", [TIME]),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},'
        ' {"name": "get_time"}]',
        "",
        [PARIS, TIME],
    ),
    (
        "granite",
        'Yes.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        "Yes.",
        [PARIS, TIME],
    ),
    (
        "granite",
        '<|tool_call|> {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
        '<|tool_call|> {"name": "get_time", "arguments": {}}',
        "",
        [PARIS, TIME],
    ),
    (
        "phi4-mini",
        '<|tool_call|>[{"type": "function", "name": "get_weather", "arguments": {"city": "Paris",'
        ' "days": 2}}, {"name": "get_time", "parameters": {}}]<|/tool_call|>',
        "",
        [PARIS, TIME],
    ),
    (
        "phi4-mini",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
        "",
        [PARIS],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id":'
        ' "a1b2c3d4e"}, {"name": "get_time", "arguments": {}}]',
        "",
        [PARIS, TIME],
    ),
    (
        "mistral-named",
        'One moment.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}'
        "[TOOL_CALLS]get_time[ARGS]{}",
        "One moment.",
        [PARIS, TIME],
    ),
    (
        "llama3-json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris",'
        ' "days": 2}}; {"name": "get_time", "parameters": {}}',
        "",
        [PARIS, TIME],
    ),
    (
        "llama3-json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
        "",
        [PARIS],
    ),
    (
        "llama3-json",
        '<|python_start|>I look.<|python_end|>{"name": "get_weather", "parameters": {"city":'
        ' "Paris", "days": 2}}{"name": "get_time", "parameters": {}}',
        "I look.",
        [PARIS, TIME],
    ),
    (
        "llama3-json",
        '<|python_start|>{"name": "get_time", "parameters": {}}<|python_end|>',
        "",
        [TIME],
    ),
    ("llama4-pythonic", "[get_weather(city='Paris', days=2), get_time()]", "", [PARIS, TIME]),
    (
        "llama4-pythonic",
        '<|python_start|>[get_weather(city="Paris", days=2)]<|python_end|>',
        "",
        [PARIS],
    ),
    (
        "qwen3-coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "Sure.",
        [PARIS, TIME],
    ),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [PARIS],
    ),
    (
        "seed",
        "Sure.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=get_time>\n</function>\n</seed:tool_call>",
        "Sure.",
        [PARIS, TIME],
    ),
    (
        "deepseek-v3",
        deepseek(
            "Yes.<tool_calls_begin_><tool_call_begin_>function<tool_sep_>get?weather\n```json\n"
            '{"city": "Paris", "days": 2}\n```<tool_call_end_>\n<tool_call_begin_>function'
            "<tool_sep_>get?time\n```json\n{}\n```<tool_call_end_><tool_calls_end_>"
        ).replace("?", "_"),
        "Yes.",
        [PARIS, TIME],
    ),
    (
        "deepseek-v31",
        deepseek(
            '<tool_calls_begin_><tool_call_begin_>get?weather<tool_sep_>{"city": "Paris", "days":'
            " 2}<tool_call_end_><tool_call_begin_>get?time<tool_sep_>{}<tool_call_end_>"
            "<tool_calls_end_>"
        ).replace("?", "_"),
        "",
        [PARIS, TIME],
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [PARIS, TIME],
    ),
    (
        "kimi-k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:12"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "I look.",
        [PARIS],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Weather, then.<|end|><|start|>assistant<|channel|>commentary"
        '<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather'
        ' <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
        "I look.",
        [PARIS],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "words", "calls"), ANSWERS, ids=lambda v: str(v)[:14])
def test_calls_are_read(family: str, text: str, words: str, calls: list[Any]) -> None:
    answer = read(text, family)
    assert (answer.text, loaded(answer)) == (words, calls)
    assert answer.reasoning == ("Weather, then." if family == "harmony" else "")


@pytest.mark.parametrize(("family", "text", "words", "calls"), ANSWERS, ids=lambda v: str(v)[:14])
def test_calls_are_read_at_every_split(
    family: str, text: str, words: str, calls: list[Any]
) -> None:
    whole = read(text, family)
    for place in range(len(text) + 1):
        assert read(text, family, [place]) == whole
    assert read(text, family, range(len(text))) == whole


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_however_the_text_is_cut_the_answer_is_the_same(data: st.DataObject) -> None:
    family, text, _, _ = data.draw(st.sampled_from(ANSWERS))
    end = data.draw(st.integers(0, len(text)))  # it may also break off
    cuts = data.draw(st.lists(st.integers(0, end), max_size=12))
    assert read(text[:end], family, cuts) == read(text[:end], family)
    assert read(text[:end], family, range(end)) == read(text[:end], family)


MARKS = sorted(
    {part for _, text, _, _ in ANSWERS for part in text.replace(">", ">\0").split("\0")}
    | {"<think>", "</think>", "get_weather", *'{}[]":,\\ \n('}
)  # fmt: skip


@given(st.sampled_from(sorted(CALL_FORMATS)), st.lists(st.sampled_from(MARKS), max_size=12))
@settings(max_examples=1000, deadline=None)
def test_no_text_breaks_a_parser(family: str, parts: list[str]) -> None:
    text = "".join(parts)
    whole = read(text, family, reasoning="think")
    assert read(text, family, range(len(text)), reasoning="think") == whole
    assert all(call.name for call in whole.calls)


NUM_DAMAGED = int(os.environ.get("TRIPTYCH_NUM_DAMAGED", "100"))
"""Answers per format; 10,000 take some minutes."""


def damaged(rng: random.Random, family: str) -> str:
    """An answer of a family, or of any, with parts missing, twice, elsewhere or made up."""
    own = [text for name, text, _, _ in ANSWERS if name == family]
    text = rng.choice(own if rng.random() < 0.8 else [text for _, text, _, _ in ANSWERS])
    for _ in range(rng.randrange(1, 5)):
        start, end = sorted(rng.choices(range(len(text) + 1), k=2))
        end = min(end, start + rng.choice([1, 8, 200]))
        part = rng.choice(
            ["", 2 * text[start:end], rng.choice(MARKS), rng.choice("\0\ud83d\U0001f600")]
        )
        place = rng.choice([start, start, rng.randrange(len(text) + 1)])
        text = text[:start] + text[end:] if place == start else text
        text = text[:place] + part + text[place:]
    return text


@pytest.mark.parametrize("family", sorted(CALL_FORMATS))
def test_damaged_answers_break_no_parser(family: str) -> None:
    for seed in range(NUM_DAMAGED):
        rng = random.Random(f"{family} {seed}")
        text = damaged(rng, family)
        reasoning = rng.choice(["", "think"])
        whole = read(text, family, reasoning=reasoning)
        cuts = rng.choices(range(len(text) + 1), k=rng.randrange(20))
        assert read(text, family, cuts, reasoning=reasoning) == whole, (seed, text)
        assert all(call.name and call.arguments[:1] in ("", "{") for call in whole.calls), text


@given(st.sampled_from(sorted(CALL_FORMATS)), st.text(alphabet="abc <>.\n", max_size=40))
def test_plain_text_is_left_as_it_is(family: str, text: str) -> None:
    answer = read(text, family)
    assert (answer.text, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>no call</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '{"name": "unknown", "arguments": {}}'),
        ("hermes", '```json\n{"name": "Ada", "age": 36}\n```'),
        ("hermes", 'Write {"name": "get_time", "arguments": {}}.'),
        ("llama3-json", '{"name": "unknown", "parameters": {}}'),
        ("llama3-json", '{"answer": 42}'),
        ("llama3-json", "<|python_tag|>print(1)"),
        ("llama4-pythonic", "[1, 2, 3]"),
        ("llama4-pythonic", "[get_weather(*cities)]"),
        ("llama4-pythonic", "[rm(path='/')]"),
        ("mistral-named", "[TOOL_CALLS]get_weather[ARGS]Paris"),
        ("qwen3-coder", "<tool_call>\nget_weather\n</tool_call>"),
        ("glm", "<tool_call>no call</tool_call>"),
    ],
)
def test_what_is_no_call_is_text(family: str, text: str) -> None:
    answer = read(text, family)
    assert (answer.text, answer.calls) == (text, [])


def test_mistral_may_number_its_calls() -> None:
    text = '[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris", "days": 2}'
    for cuts in ((), range(len(text))):
        assert loaded(read(text, "mistral-named", cuts)) == [PARIS]


def test_gpt_oss_may_name_the_tool_in_the_role() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather"
        '<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>'
    )
    for cuts in ((), range(len(text))):
        answer = read(text, "harmony", cuts)
        assert (answer.reasoning, answer.text, loaded(answer)) == ("Hm.", "", [PARIS])


def test_phi_4_mini_may_mark_its_calls_with_tokens() -> None:
    text = '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
    for end in ("<|/tool_call|>", ""):
        assert loaded(read(text + end, "phi4-mini")) == [PARIS]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_call>get_time</tool_call>", [TIME]),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days"
            "</arg_key><arg_value>2</arg_value></tool_call><tool_call>get_time</tool_call>",
            [PARIS, TIME],
        ),
    ],
)
def test_newer_models_of_glm_write_calls_on_one_line(text: str, calls: list[Any]) -> None:
    for cuts in ((), range(len(text))):
        answer = read(text, "glm", cuts)
        assert (answer.text, loaded(answer)) == ("", calls)


def test_a_mark_that_breaks_off_is_not_shown() -> None:
    text = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_ca'
    answer = read(text, "hermes")
    assert (answer.text, loaded(answer)) == ("", [TIME])


DEEP = '{"a": ' * 5000 + "1" + "}" * 5000


@pytest.mark.parametrize("value", [DEEP, "NaN", "1e999"])
def test_values_that_are_no_json_are_texts(value: str) -> None:
    text = f"<tool_call><function=get_time><parameter=a>{value}</parameter></function></tool_call>"
    assert loaded(read(text, "qwen3-coder")) == [("get_time", {"a": value})]


def test_a_number_of_python_that_json_lacks_is_text() -> None:
    answer = read("[get_time(a=1e999)]", "llama4-pythonic")
    assert (answer.text, answer.calls) == ("[get_time(a=1e999)]", [])


def test_arguments_in_a_string_that_are_too_deep_are_none() -> None:
    call = json.dumps({"name": "get_time", "arguments": DEEP})
    text = f"<tool_call>{call}</tool_call>"
    answer = read(text, "hermes")
    assert (answer.text, answer.calls) == (text, [])


@pytest.mark.parametrize("empty", ["", "\n\n", " \n"])
def test_empty_reasoning_leaves_no_white_space(empty: str) -> None:
    parser = AnswerSyntax("hermes", "think").parser({}, "", is_forced=False)
    answer = Answer.of([*parser.push(f"<think>{empty}</think>\n\nYes"), *parser.finish()])
    assert (answer.text, answer.reasoning) == ("Yes", "")


def test_a_call_that_breaks_off_keeps_what_came() -> None:
    answer = read('<tool_call>{"name": "get_weather", "arguments": {"city": "Par', "hermes")
    assert answer.calls == [ToolUse("get_weather", '{"city": "Par')]
    broken = read('<tool_call>{"name": "get_time", "arguments": {"a": oops}}</tool_call>', "hermes")
    assert broken.calls == [ToolUse("get_time", '{"a": ')]
    assert broken.text == ""


def test_python_may_have_the_names_of_json() -> None:
    text = "[get_time(utc=true, zone=null, parts=[false, 1])]"
    assert loaded(read(text, "llama4-pythonic")) == [
        ("get_time", {"utc": True, "zone": None, "parts": [False, 1]})
    ]


def test_arguments_in_a_string_are_unpacked() -> None:
    call = json.dumps({"name": "get_weather", "arguments": json.dumps(PARIS[1])})
    assert loaded(read(f"<tool_call>{call}</tool_call>", "hermes")) == [PARIS]


def test_values_follow_the_schema() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n75\n</parameter>\n"
        "<parameter=days>\ntwo\n</parameter>\n<parameter=more>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert loaded(read(text, "qwen3-coder")) == [
        ("get_weather", {"city": "75", "days": "two", "more": [1, 2]})
    ]


@pytest.mark.parametrize("name", REASONING_FORMATS)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_comes_before_the_answer(name: str, is_open: bool) -> None:
    reasoning = REASONING_FORMATS[name]
    begin = "" if is_open else reasoning.open
    text = (
        f'{begin}\nHm <tool_call>?\n\n{reasoning.close}\n\nSo.\n<tool_call>{{"name": "get_time"}}'
    )
    for cuts in ((), range(len(text))):
        answer = read(text, "hermes", cuts, reasoning=name, is_reasoning=is_open)
        assert (answer.reasoning, answer.text) == ("Hm <tool_call>?", "So.")
        assert loaded(answer) == [TIME]


def test_an_answer_without_reasoning_keeps_its_white_space() -> None:
    assert read("\n  Yes. \n", "hermes", reasoning="think") == Answer(text="\n  Yes. \n")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "75", "75"),
        ({"type": ["string", "null"]}, "75", "75"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "75", "75"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "[a", "[a"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "True", True),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "False", False),
        ({"type": "integer"}, "75", 75),
        ({"oneOf": "wrong"}, "75", 75),
        ({}, "None", "None"),
    ],
)
def test_values_are_of_the_types_that_a_parameter_may_have(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    """An optional text of pydantic's is a union, and no number even if it looks like one."""
    parser = AnswerParser(None, CALL_FORMATS["glm"], {"f": {"properties": {"a": schema}}})
    call = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert loaded(Answer.of([*parser.push(call), *parser.finish()])) == [("f", {"a": value})]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            '{{ tools }}Respond in the format {"name": function name, "parameters": ...}',
            "llama3-json",
        ),
        (
            '{{ tools }}{"name": function name, "parameters": ...}<|python_start|><|python_end|>',
            "llama3-json",
        ),
        ("{{ tools }}[func_name1(params_name1=params_value1...)]", "llama4-pythonic"),
        ("<|tool|>{{ message['tools'] }}<|/tool|>", "phi4-mini"),
        ("{{ '<|im_system|>tool_declare<|im_middle|>' }}{{ tools }}", "kimi-k2"),
        ("{% if tools %}respond only with <|tool_call|>{% endif %}", "granite"),
        ("{{ tools }}<tool_call>", "hermes"),
        (deepseek("{% for tool in message['tool_calls'] %}<tool_sep_>{% endfor %}"), "hermes"),
    ],
)
def test_a_model_has_the_format_of_its_template(template: str, name: str) -> None:
    """A model whose template supports no tools gets Hermes's, and writes them."""
    syntax = AnswerSyntax.of(template, ModelOptions(), ())
    assert syntax.calls == name
    assert syntax.template_supports_tools is not template.startswith("{% for")


def test_formats_are_known_by_templates() -> None:
    assert set(ALIASES.values()) <= CALL_FORMATS.keys() | REASONING_FORMATS.keys()
    assert call_format_of("{% for tool in tools %}<tool_call>{% endfor %}") == "hermes"
    assert call_format_of("<tool_call>\n<function=example>") == "qwen3-coder"
    assert call_format_of("no tools at all") == "hermes"
    assert call_format_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}") == "mistral-named"
    assert reasoning_format_of("{{ content.split('</think>') }}") == "think"
    assert reasoning_format_of("plain") == ""


def test_an_answer_in_json_that_is_no_call_is_not_held_back() -> None:
    parser = AnswerParser(None, CALL_FORMATS["hermes"], TOOLS)
    assert Answer.of(parser.push('{"age"')).text == '{"age"'
