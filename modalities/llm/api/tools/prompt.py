"""Describes tools in the prompt's text, where a chat template does not support them.

Owns the text of tools, calls and results, in Hermes's format, which `formats` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.modalities.llm.api.multimodal import words_of

_TOOLS = """\
You may call functions to help with the user's request. They are described here as JSON:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON within tags:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conversation with tools, calls and results as text."""
    said = [_describe_calls(message) for message in messages]
    if not tools:
        return said
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=listed)
    if said and said[0]["role"] == "system":
        first, *rest = said
        return [{**first, "content": _join(first["content"], text)}, *rest]
    return [{"role": "system", "content": text}, *said]


def _describe_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        result = f"<tool_response>\n{_join(message['content'])}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [call_text(call["function"]) for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": _join(message.get("content"), *texts)}


def call_text(function: Mapping[str, Any]) -> str:
    """A call as Hermes's models write it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _join(content: str | Sequence[str] | None, *texts: str) -> str:
    """A message's text, followed by more text."""
    own = words_of(content)
    return "\n\n".join([own, *texts] if own else texts)
