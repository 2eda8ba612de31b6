"""Conversations with calls and thoughts, in the fields that a template reads."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.modalities.llm.api.template_child import environment
from triptych.modalities.llm.api.tools.prompt import MessageFields

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
    fields = MessageFields(template)
    return environment().from_string(template).render(message=fields(message))


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


def test_thoughts_have_the_name_that_a_template_gives_them() -> None:
    own = "{{ message.thinking }}|{{ message.content }}"
    assert rendered(own, THOUGHT) == "Hm.|Words."
    assert rendered(own, CALLING) == "Hm.|", "before a call gpt-oss takes one of both"
    assert rendered("{{ message['thinking'] }}", THOUGHT) == "Hm."
    assert rendered(own, {"role": "assistant", "content": "Words."}) == "|Words."
    usual = "{{ message.reasoning_content }}|{{ message.content }}"
    assert rendered(usual, CALLING) == "Hm.|Words."
    assert "thinking" not in MessageFields(usual)(CALLING)
