"""Grammars of answers that call tools: where a call is required, or must follow its schema.

Owns the text around the arguments, in Lark's notation (see `core.grammar.constraint`). Families
whose marks are special tokens write forced calls as a JSON list. Where calls are optional, text
that begins like a call must become one: with a mark, or with the name of a tool in a bare object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.grammar.constraint import Constraint
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.schema import ToolSet

_OPEN, _NEXT, _CLOSE = "<tool_call>", "\n<tool_call>", "\n</tool_call>"
_ANYTHING = "/(?s:.*)/"
_WORDS_OR_CALLS = frozenset({"hermes", "llama3-json"})
"""Formats in which calls may be the object alone."""
_SPACES = r"[ \t\n\r]*"
_FENCE = rf"(```(json)?|<tools>){_SPACES}"
_OBJECT = rf'\{{{_SPACES}("type"{_SPACES}:{_SPACES}"function"{_SPACES},{_SPACES})?"name"'
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"properties": {}})


def answer_constraint(
    tool_set: ToolSet, syntax: AnswerSyntax, reasoning_end: str, form: Constraint | None = None
) -> Constraint | None:
    """The constraint of an answer that may call tools; `None` where any text is allowed.

    With a `reasoning_end` the answer begins within reasoning, which that mark ends. Text that is
    not a call has the `form`, if there is one: agents send it with every step, also where a call is
    required.
    """
    form = None if tool_set.is_required else form
    is_marked = syntax.calls == "hermes"
    is_strict = any(tool.function.strict for tool in tool_set.tools)
    may_call = bool(tool_set.tools) and is_marked if form else syntax.calls in _WORDS_OR_CALLS
    has_calls = tool_set.is_required or (may_call and (form is not None or is_strict))
    if not has_calls and not (form is not None and reasoning_end):
        return form
    rules = [f"start: {'reasoning ' if reasoning_end else ''}answer"]
    if has_calls:
        if not (tool_set.is_required or form):
            rules += _words_or_calls(tool_set, is_marked=is_marked)
        elif is_marked:
            rules += _marked_rules(tool_set, has_form=form is not None)
        else:
            rules += _list_rules(tool_set)
        rules += _call_rules(tool_set)
    else:
        rules.append("answer: @form")
    if reasoning_end:
        rules.append(f"reasoning[suffix={_quote(reasoning_end)}]: {_ANYTHING}")
    grammar = "\n".join(rules)
    schemas = [*_schemas(tool_set)] if has_calls else []
    if form is not None:
        return replace(form, around=grammar, schemas=schemas)
    return Constraint("grammar", grammar, "tools", schemas=schemas)


def _marked_rules(tool_set: ToolSet, *, has_form: bool) -> Sequence[str]:
    """Calls between marks, or text in the form."""
    form = "@form | " if has_form else ""
    return (f"answer: {form}{_quote(_OPEN)} marked", *_between_marks(tool_set))


def _between_marks(tool_set: ToolSet) -> Sequence[str]:
    """The calls after the first mark."""
    calls = "body" if tool_set.has_one_call else f"body ({_quote(_NEXT)} body)*"
    return (f"marked: {calls}", f'body: "\\n" call {_quote(_CLOSE)}')


def _words_or_calls(tool_set: ToolSet, *, is_marked: bool) -> Iterator[str]:
    """Calls, with or without marks, or words that do not begin with one."""
    heads = _heads(tool_set, has_fence=is_marked)
    unlike = f"~(/{'|'.join(heads)}/ {_ANYTHING})"
    separator = _SPACES if is_marked else f"{_SPACES};?{_SPACES}"
    more = "" if tool_set.has_one_call else f"(/{separator}/ bare)*"
    if is_marked:
        yield "answer: WORDS | words_before marked | calls"
        yield from _between_marks(tool_set)
        yield f"words_before[suffix={_quote(_OPEN)}]: UNLIKE"
        yield f"WORDS: ~({_ANYTHING} {_quote(_OPEN)} {_ANYTHING}) & UNLIKE"
    else:
        yield "answer: UNLIKE | calls"
    yield f"UNLIKE: {unlike}"
    yield f"calls: bare {more}"
    yield "bare: " + " | ".join(f"bare_{index}" for index in range(len(heads)))
    for index, head in enumerate(heads):
        number = index % len(tool_set.tools)
        end = "FENCE_END" if index >= len(tool_set.tools) else ""
        yield f"bare_{index}: head_{index} ARGUMENTS arguments_{number} END {end}"
        yield f"head_{index}[lazy]: /{head}/"
    yield rf'ARGUMENTS: /{_SPACES},{_SPACES}"(arguments|parameters)"{_SPACES}:{_SPACES}/'
    yield rf"END: /{_SPACES}\}}/"
    if is_marked:
        yield rf"FENCE_END: /{_SPACES}(```|<\/tools>)/"


def _heads(tool_set: ToolSet, *, has_fence: bool) -> Sequence[str]:
    """How a call without marks begins, for each tool, alone and then in a fence."""
    alone = [
        rf'{_OBJECT}{_SPACES}:{_SPACES}"{re.escape(tool.function.name)}"' for tool in tool_set.tools
    ]
    openings = ("", _FENCE) if has_fence else ("",)
    return [f"{_SPACES}{opening}{head}" for opening in openings for head in alone]


def _list_rules(tool_set: ToolSet) -> Sequence[str]:
    calls = "call" if tool_set.has_one_call else 'call (", " call)*'
    return (f'answer: "[" {calls} "]"',)


def _call_rules(tool_set: ToolSet) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(tool_set.tools)))
    for index, tool in enumerate(tool_set.tools):
        before = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
        yield f'call_{index}: {_quote(before)} arguments_{index} "}}"'
        yield f"arguments_{index}: %json @{index}"


def _schemas(tool_set: ToolSet) -> Iterator[str]:
    """The schema of each tool's arguments: any object where its own need not be enforced.

    A schema's references begin at its own root.
    """
    for tool in tool_set.tools:
        follows = tool_set.is_required or tool.function.strict
        own = (tool.function.parameters or _NO_ARGUMENTS) if follows else {}
        yield json.dumps({"type": "object", **own})


def _quote(text: str) -> str:
    return json.dumps(text)
