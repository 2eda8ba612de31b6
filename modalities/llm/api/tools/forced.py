"""Grammars of answers that call tools: where a call is required, or must follow its schema.

Owns what is written around the arguments, in Lark's notation (see `core.grammar.source`). Families
whose marks are special tokens write forced calls as a list in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from triptych.core.grammar.source import Constraint, tidy_schema
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.schema import Offer, Tool

_OPEN, _CLOSE = "<tool_call>", "\n</tool_call>"
_ANYTHING = "/(?s:.*)/"
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({"properties": {}})


def answer_constraint(
    offer: Offer, syntax: AnswerSyntax, thoughts_end: str, form: Constraint | None = None
) -> Constraint | None:
    """The form of an answer that may call what is offered; `None` where any text will do.

    The answer begins within thoughts that end with `thoughts_end`, if that is given. What is no
    call has the `form`, if there is one: agents ask for it in every step, where a call is required,
    too.
    """
    form = None if offer.is_required else form
    is_marked = syntax.calls == "hermes"
    may_call = any(form is not None or tool.function.strict for tool in offer.tools)
    has_calls = offer.is_required or (is_marked and may_call)
    if not has_calls and not (form is not None and thoughts_end):
        return form
    rules = [f"start: {'thoughts ' if thoughts_end else ''}answer"]
    if has_calls:
        rules += _marked(offer, has_form=form is not None) if is_marked else _listed(offer)
        rules += _calls(offer)
    else:
        rules.append("answer: @form")
    if thoughts_end:
        rules.append(f"thoughts[suffix={_quoted(thoughts_end)}]: {_ANYTHING}")
    grammar = "\n".join(rules)
    return replace(form, around=grammar) if form else Constraint("grammar", grammar, "tools")


def _marked(offer: Offer, *, has_form: bool) -> Sequence[str]:
    """Calls between marks; where they are not required text goes before them, or in their place."""
    mark, next_mark = _quoted(_OPEN), _quoted("\n" + _OPEN)
    body = f'"\\n" call {_quoted(_CLOSE)}'
    calls = "body" if offer.has_one_call else f"body ({next_mark} body)*"
    if offer.is_required:
        return (f"answer: {mark} {calls}", f"body: {body}")
    if has_form:
        return (f"answer: @form | {mark} {calls}", f"body: {body}")
    return (
        f"answer: WORDS | words_before {calls}",
        f"body: {body}",
        f"words_before[suffix={mark}]: {_ANYTHING}",
        f"WORDS: ~({_ANYTHING} {mark} {_ANYTHING})",
    )


def _listed(offer: Offer) -> Sequence[str]:
    calls = "call" if offer.has_one_call else 'call (", " call)*'
    return (f'answer: "[" {calls} "]"',)


def _calls(offer: Offer) -> Iterator[str]:
    yield "call: " + " | ".join(f"call_{index}" for index in range(len(offer.tools)))
    for index, tool in enumerate(offer.tools):
        yield from _call(index, tool, follows=bool(offer.is_required or tool.function.strict))


def _call(index: int, tool: Tool, *, follows: bool) -> Sequence[str]:
    """One tool's call, and its arguments: a schema's references begin at its own root.

    They are any object unless it `follows` the schema.
    """
    own = (tool.function.parameters or _NO_ARGUMENTS) if follows else {}
    schema = tidy_schema({"type": "object", **own})
    before = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
    return (
        f'call_{index}: {_quoted(before)} arguments_{index} "}}"',
        f"arguments_{index}: %json {json.dumps(schema)}",
    )


def _quoted(text: str) -> str:
    return json.dumps(text)
