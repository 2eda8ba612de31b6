"""Tools in a prompt, where a chat template knows none.

Owns the words with which a model is told of them, of calls and of their results. The format is
Hermes's, which `formats` reads.
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


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The conversation with everything about tools in its texts."""
    said = [_in_words(message) for message in messages]
    if not tools:
        return said
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=listed)
    if said and said[0]["role"] == "system":
        first, *rest = said
        return [{**first, "content": _joined(first["content"], text)}, *rest]
    return [{"role": "system", "content": text}, *said]


def _in_words(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        result = f"<tool_response>\n{_joined(message['content'])}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [call_in_words(call["function"]) for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": _joined(message.get("content"), *texts)}


def call_in_words(function: Mapping[str, Any]) -> str:
    """A call as Hermes's models write it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _joined(content: str | Sequence[str] | None, *texts: str) -> str:
    """Some text after a message's own."""
    own = words_of(content)
    return "\n\n".join([own, *texts] if own else texts)
