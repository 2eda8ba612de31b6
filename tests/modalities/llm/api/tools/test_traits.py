"""Conversations with calls and reasoning, in the fields that a template reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from triptych.modalities.llm.api import template_child
from triptych.modalities.llm.api.template_child import environment
from triptych.modalities.llm.api.tools.traits import TemplateTraits, supports_tools

CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": {"city": "Zürich", "days": [1]}},
}
THOUGHT = {"role": "assistant", "content": "Words.", "reasoning_content": "Hm."}
CALLING = {**THOUGHT, "tool_calls": [CALL]}
TEXT = '{"city": "Zürich", "days": [1]}'


def rendered(template: str, message: dict[str, Any]) -> str:
    """What a template makes of a message."""
    (taken,), _ = TemplateTraits(template)([message])
    return environment().from_string(template).render(message=taken)


@pytest.mark.parametrize(
    "call",
    [
        "'<' + tool['function']['arguments'] + '>'",
        "'<' + tool.function.arguments + '>'",
        "'<' + '' + tool['function']['arguments'] }}{{ '>'",
        "'<' }}{{ tool.function.arguments | tojson }}{{ '>'",
        "'<' + (tool.function.arguments | tojson) + '>'",
        "'<' + tool.function.arguments|tojson + '>'",
        "'<' }}{{ tool.function.arguments if tool.function.arguments is string else"
        " tool.function.arguments | tojson }}{{ '>'",
    ],
)
def test_arguments_are_text_where_a_template_joins_them(call: str) -> None:
    """DeepSeek's templates join them to their marks; others make JSON of them."""
    template = "{% for tool in message.tool_calls %}{{ " + call + " }}{% endfor %}"
    assert rendered(template, CALLING) == f"<{TEXT}>"
    assert CALL["function"]["arguments"] == {"city": "Zürich", "days": [1]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}", True),
        ("{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}", True),
        ("{{ raise_exception('System role not supported') }} {{ 'system' }}", False),
        ("{{ raise_exception('Conversation roles must alternate user/assistant') }}", False),
    ],
)
def test_whether_a_conversation_begins_with_the_system(template: str, takes: bool) -> None:
    assert TemplateTraits(template).takes_system == takes


def test_reasoning_has_the_name_that_a_template_gives_it() -> None:
    own = "{% if message.tool_calls %}{% endif %}{{ message.thinking }}|{{ message.content }}"
    assert rendered(own, THOUGHT) == "Hm.|Words."
    assert rendered(own, CALLING) == "Hm.|", "before a call gpt-oss takes one of both"
    assert rendered("{{ message['thinking'] }}", THOUGHT) == "Hm."
    assert rendered(own, {"role": "assistant", "content": "Words."}) == "|Words."
    usual = own.replace("message.thinking", "message.reasoning_content")
    assert rendered(usual, CALLING) == "Hm.|Words."
    (taken,), _ = TemplateTraits(usual)([CALLING])
    assert "thinking" not in taken


WEATHER = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALLS = [
    {"id": "toolu_01", "type": "function", "function": WEATHER},
    {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": {}}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_2", "content": "Noon."},
    {"role": "tool", "tool_call_id": "toolu_01", "content": "Sun."},
]
CONVERSATION = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    *RESULTS,
]
TOOLS = [{"type": "function", "function": {"name": "get_time"}}]


def conversation(template: str, calls: str = "hermes") -> str:
    """What a template makes of a conversation with two calls."""
    messages, tools = TemplateTraits(template, calls)(CONVERSATION, TOOLS)
    return environment().from_string(template).render(messages=messages, tools=tools)


def test_calls_of_kimi_are_numbered_through_the_conversation() -> None:
    """As its card names them; the result is that of the tool."""
    template = (
        "{% for m in messages %}{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }};"
        "{% endfor %}{{ m.name or m.role }}:{{ m.tool_call_id }};{% endfor %}"
    )
    assert conversation(template, "kimi-k2") == (
        "user:;<|tool_call_begin|>functions.get_weather:0;<|tool_call_begin|>functions.get_time:1;"
        "assistant:;get_time:functions.get_time:1;get_weather:functions.get_weather:0;"
    )


@pytest.mark.parametrize("calls", ["kimi-k2", "granite", "hermes"])
def test_contents_may_be_in_parts(calls: str) -> None:
    """As templates of models that see have them."""
    in_one, in_parts = (
        TemplateTraits("{{ tools }}", calls)(
            [{**message, "content": form(message["content"])} for message in CONVERSATION]
        )[0]
        for form in (str, lambda text: [{"type": "text", "text": text}])
    )
    for whole, parts in zip(in_one, in_parts, strict=True):
        assert "".join(part["text"] for part in parts["content"]) == whole["content"]


def test_ids_that_mistral_would_reject_become_short_ones() -> None:
    template = (
        "{% for m in messages %}{% for call in m.tool_calls %}{% if call.id|length != 9 %}"
        "{{ raise_exception('length 9') }}{% endif %}{{ call.id }};{% endfor %}"
        "{{ m.tool_call_id }};{% endfor %}"
    )
    _, first, second, _, again, once_more, _ = conversation(template).split(";")
    assert (again, once_more) == (second, first)
    assert first != second
    own = [{**CALLS[0], "id": "a1b2c3d4e"}]
    (taken,), _ = TemplateTraits(template)([{"role": "assistant", "tool_calls": own}])
    assert taken["tool_calls"][0]["id"] == "a1b2c3d4e"


def test_a_template_of_llama_gets_one_call_in_a_message_with_its_result() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls|length > 1 %}{{ raise_exception("
        "'This model only supports single tool-calls at once!') }}{% endif %}"
        "{{ m.content }}{{ (m.tool_calls or [{}])[0].id }};{% endfor %}"
    )
    assert conversation(template) == "Hi.;call_2;Noon.;I look.toolu_01;Sun.;"
    (*_, last), _ = TemplateTraits(template)(CONVERSATION[:3])
    assert last["tool_calls"] == [CALLS[0]], "a call that has no result is not lost"


_BARE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if tools %}{% endif %}"
EACH = [json.dumps(call["function"]) for call in CALLS]
LIST = "[" + ", ".join(EACH) + "]"
HERMES = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in EACH)


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (
            "granite",
            f"assistant:I look.<|tool_call|>{LIST};tool_response:Noon.;tool_response:Sun.;",
        ),
        (
            "phi4-mini",
            f"assistant:I look.<|tool_call|>{LIST}<|/tool_call|>;tool_response:Noon.;"
            "tool_response:Sun.;",
        ),
        ("hermes", f"assistant:I look.{HERMES};tool:Noon.;tool:Sun.;"),
    ],
)
def test_calls_are_text_where_a_template_shows_none(calls: str, shown: str) -> None:
    """Those of Granite 3 and Phi-4-mini show roles and contents alone."""
    assert conversation(_BARE, calls) == f"user:Hi.;{shown}"


def test_kimi_s_first_template_gets_calls_and_results_as_text() -> None:
    template = "{{ '<|im_system|>tool_declare<|im_middle|>' if tools }}" + _BARE
    assert conversation(template, "kimi-k2").endswith(
        "assistant:I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
        "functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>;tool:## Return of functions.get_time:1\nNoon.;"
        "tool:## Return of functions.get_weather:0\nSun.;"
    )


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_tools_are_in_the_system_message_where_phi_looks_for_them(system: list[Any]) -> None:
    template = "{% for message in messages %}{{ message['tools'] }};{% endfor %}"
    messages, tools = TemplateTraits(template)([*system, CONVERSATION[0]], TOOLS)
    assert (messages[0]["tools"], tools) == ('[{"name": "get_time"}]', ())
    assert messages[0]["content"] == ("Be brief." if system else "")
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("template", "template_supports_tools"),
    [
        ("{% if tools %}{% endif %}", True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools }}", True),
        ("{% if message['tools'] %}{% endif %}", True),
        ("{{ message.tool_calls }}", False),
        ("{# tools #}{{ 'tools' }}", False),
    ],
)
def test_a_template_that_supports_tools_lists_them(
    template: str, template_supports_tools: bool
) -> None:
    assert supports_tools(template) is template_supports_tools


def test_nothing_of_a_template_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constants might take for ever, its filters be unknown: that is for the child to find."""
    computed: list[object] = []
    monkeypatch.setattr(template_child, "_to_json", computed.append)
    template = "{{ [1] | tojson }}{{ 1 | no_such_filter }}" + "{{ a" + " + a" * 2000 + " }}"
    assert not supports_tools(template)
    assert supports_tools(template + "{{ tools }}")
    assert not computed
