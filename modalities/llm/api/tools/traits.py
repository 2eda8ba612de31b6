"""A conversation with calls and reasoning, in the fields that a chat template reads.

Owns the differences of published templates: how they take tools, whether they render calls at all
or several in one message, which ids they accept, and their name of reasoning. Text added here goes
into the prompt as the template's own, whose marks are special tokens; text of callers has been
escaped before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jinja2 import nodes

from triptych.modalities.llm.api.template_child import environment
from triptych.modalities.llm.api.tools.prompt import call_text

_Fields: TypeAlias = Mapping[str, Any]

_OWN_REASONING = re.compile(r"""message(\.|\[['"])thinking\b""")
_TEXT_ARGUMENTS = re.compile(
    r"""\+ *\w+((\.|\[['"])\w+(['"]\])?)*(\.|\[['"])arguments(['"]\])? *(\+|[-}])"""
)
_SYSTEM_TOOLS = re.compile(r"""message(\.|\[['"])tools\b""")
_CHECKED_IDS = re.compile(r"\bid *\| *length *(!=|<) *9\b")
_NUMBERED_IDS = ("<|tool_call_begin|>", "tool_declare<|im_middle|>")
_ONE_CALL = "single tool-call"
_NO_SYSTEM = re.compile(r"system \w+ (is |are )?not supported", re.IGNORECASE)

_LIST_MARKS = {"granite": ("<|tool_call|>", ""), "phi4-mini": ("<|tool_call|>", "<|/tool_call|>")}
"""The marks around a list of calls in families whose templates do not render calls."""
_KIMI_CALLS = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>".format
_KIMI_CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>".format


def supports_tools(template: str) -> bool:
    """Whether a template renders tools."""
    return _SYSTEM_TOOLS.search(template) is not None or _reads_tools(template)


def _reads_tools(template: str) -> bool:
    """Whether a template reads `tools`; parses only, since compiling evaluates constants."""
    rest: list[nodes.Node] = [environment().parse(template)]
    while rest:
        node = rest.pop()
        if isinstance(node, nodes.Name) and (node.name, node.ctx) == ("tools", "load"):
            return True
        rest.extend(node.iter_child_nodes())
    return False


def _takes_system(template: str) -> bool:
    """Whether a template renders a first message of the system, and does not raise on it."""
    is_known = "system" in template or "raise_exception" not in template
    return is_known and _NO_SYSTEM.search(template) is None


class TemplateTraits:
    """The fields that one `template` reads, for a model that writes `calls` in that format."""

    def __init__(self, template: str, calls: str = "hermes") -> None:
        self._calls = calls
        self._has_own_reasoning = _OWN_REASONING.search(template) is not None
        self._joins_arguments = _TEXT_ARGUMENTS.search(template) is not None
        self._has_system_tools = not _reads_tools(template) and supports_tools(template)
        self._shows_calls = "tool_calls" in template
        self._has_one_call = _ONE_CALL in template
        self.takes_system = _takes_system(template)
        """Whether a conversation may begin with a message of the system."""
        self._new_id: Callable[[str, str, int], str] | None = None
        if any(mark in template for mark in _NUMBERED_IDS):
            self._new_id = _numbered_id
        elif _CHECKED_IDS.search(template):
            self._new_id = _short_id

    def __call__(
        self, messages: Sequence[_Fields], tools: Sequence[_Fields] = ()
    ) -> tuple[list[_Fields], Sequence[_Fields]]:
        """Messages and tools as the template takes them."""
        if self._new_id is not None:
            messages = list(_rename_calls(messages, self._new_id))
        if self._has_one_call:
            messages = list(_one_call_each(messages))
        taken = [self._message(message) for message in messages]
        if tools and self._has_system_tools:
            return _with_system_tools(taken, tools), ()
        return taken, tools

    def _message(self, message: _Fields) -> _Fields:
        """A message for the template; one with `thinking` renders it or text before a call."""
        calls = message.get("tool_calls")
        if not self._shows_calls:
            message = self._shown(message)
        elif calls and self._joins_arguments:
            message = {**message, "tool_calls": [_with_text(call) for call in calls]}
        if self._has_own_reasoning and (reasoning := message.get("reasoning_content")):
            message = {**message, "thinking": reasoning, **({"content": ""} if calls else {})}
        return message

    def _shown(self, message: _Fields) -> _Fields:
        """The message with its calls, or the name of the call that it answers, in its text."""
        content = message.get("content") or ""
        if message["role"] == "tool" and self._calls in _LIST_MARKS:
            return {**message, "role": "tool_response"}
        if message["role"] == "tool" and self._calls == "kimi-k2":
            title = f"## Return of {message['tool_call_id']}\n"
            return {**message, "content": _join(title, content)}
        calls = message.get("tool_calls")
        if not calls:
            return message
        return {**message, "content": _join(content, self._written(calls))}

    def _written(self, calls: Sequence[_Fields]) -> str:
        if self._calls == "kimi-k2":
            texts = (_KIMI_CALL(call["id"], _json(call["function"]["arguments"])) for call in calls)
            return _KIMI_CALLS("".join(texts))
        if self._calls not in _LIST_MARKS:
            return "\n".join(call_text(call["function"]) for call in calls)
        before, after = _LIST_MARKS[self._calls]
        named = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
        return before + _json(named) + after


def _join(*contents: str | Sequence[_Fields]) -> str | list[_Fields]:
    """One content of several; a list of parts if one of them is a list."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "".join(texts)
    parts: list[_Fields] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _rename_calls(
    messages: Sequence[_Fields], new_id: Callable[[str, str, int], str]
) -> Iterator[_Fields]:
    """Messages with other ids of calls; a result also gets the name of its function."""
    ids: dict[str, tuple[str, str]] = {}
    num_calls = 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            ids[call["id"]] = new_id(call["id"], name, num_calls), name
            calls.append({**call, "id": ids[call["id"]][0]})
            num_calls += 1
        if calls:
            yield {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            call_id, name = ids[message["tool_call_id"]]
            yield {"name": name, **message, "tool_call_id": call_id}
        else:
            yield message


def _numbered_id(given: str, name: str, number: int) -> str:
    """An id as Kimi K2 numbers the calls of a conversation."""
    return f"functions.{name}:{number}"


def _short_id(given: str, name: str, number: int) -> str:
    """Nine letters and digits, which Mistral's templates require."""
    if len(given) == 9 and given.isalnum() and given.isascii():
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def _one_call_each(messages: Sequence[_Fields]) -> Iterator[_Fields]:
    """Messages with one call each, before its result."""
    waiting: dict[str, _Fields] = {}
    for message in messages:
        if message["role"] != "tool":
            yield from waiting.values()
            waiting = {}
        elif (called := waiting.pop(message["tool_call_id"], None)) is not None:
            yield called
        calls: Sequence[_Fields] = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        bare = {"role": message["role"], "content": ""}
        waiting = {call["id"]: {**bare, "tool_calls": [call]} for call in calls}
        first = calls[0]["id"]
        waiting[first] = {**message, "tool_calls": waiting[first]["tool_calls"]}
    yield from waiting.values()


def _with_system_tools(messages: list[_Fields], tools: Sequence[_Fields]) -> list[_Fields]:
    """Messages with the tools in a system message, where Phi-4-mini's template reads them."""
    text = _json([tool["function"] for tool in tools])
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _with_text(call: _Fields) -> dict[str, Any]:
    """The call with its arguments as text, for a template that concatenates them."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": _json(function["arguments"])}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
