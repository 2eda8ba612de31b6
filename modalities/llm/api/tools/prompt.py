"""Tools and thoughts in a prompt, as a chat template wants them.

Owns the words with which a model whose template knows no tools is told of them, of calls and of
their results (the format is Hermes's, which `formats` reads), and the fields that some templates
name or fill otherwise.
"""

from __future__ import annotations

import json
import re
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


_OWN_THOUGHTS = re.compile(r"""message(\.|\[['"])thinking\b""")
_TEXT_ARGUMENTS = re.compile(
    r"""\+ *\w+((\.|\[['"])\w+(['"]\])?)*(\.|\[['"])arguments(['"]\])? *(\+|[-}])"""
)


class MessageFields:
    """What a template calls the thoughts of a message, and how it takes the arguments of calls."""

    def __init__(self, template: str) -> None:
        self._has_own_thoughts = _OWN_THOUGHTS.search(template) is not None
        self._joins_arguments = _TEXT_ARGUMENTS.search(template) is not None

    def __call__(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template takes it.

        One that names thoughts `thinking` shows thoughts or words before a call, not both.
        """
        calls = message.get("tool_calls")
        if calls and self._joins_arguments:
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        if self._has_own_thoughts and (thoughts := message.get("reasoning_content")):
            message = {**message, "thinking": thoughts, **({"content": ""} if calls else {})}
        return message


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call with its arguments as text, for a template that joins it to others."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


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
    texts = [_call(call["function"]) for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": _joined(message.get("content"), *texts)}


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _joined(content: str | Sequence[str] | None, *texts: str) -> str:
    """Some text after a message's own."""
    own = words_of(content)
    return "\n\n".join([own, *texts] if own else texts)
