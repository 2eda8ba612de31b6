"""Grammars of answers that call tools: where a call is required, or must follow its schema.

Owns what is written around the arguments, in Lark's notation (see `core.grammar.source`). Families
whose marks are special tokens write forced calls as a list in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from triptych.core.grammar.source import Constraint, tidy_schema
from triptych.modalities.llm.api.tools.formats import AnswerSyntax
from triptych.modalities.llm.api.tools.schema import Offer, Tool

_OPEN, _CLOSE = "<tool_call>", "\n</tool_call>"
_ANYTHING = "/(?s:.*)/"


def calls_constraint(offer: Offer, syntax: AnswerSyntax, thoughts_end: str) -> Constraint | None:
    """The form of an answer that may call what is offered; `None` where any text will do.

    The answer begins within thoughts that end with `thoughts_end`, if that is given.
    """
    is_strict = any(tool.function.strict for tool in offer.tools)
    is_marked = syntax.calls == "hermes"
    if not offer.is_required and not (is_strict and is_marked):
        return None
    rules = [
        f"start: {'thoughts ' if thoughts_end else ''}answer",
        *(_marked(offer) if is_marked else _listed(offer)),
        "call: " + " | ".join(f"call_{index}" for index in range(len(offer.tools))),
        *(rule for index, tool in enumerate(offer.tools) for rule in _call(index, tool)),
    ]
    if thoughts_end:
        rules.append(f"thoughts[suffix={_quoted(thoughts_end)}]: {_ANYTHING}")
    return Constraint("grammar", "\n".join(rules), "tools")


def _marked(offer: Offer) -> Sequence[str]:
    """Calls between marks; text goes before them where they are not required."""
    mark, next_mark = _quoted(_OPEN), _quoted("\n" + _OPEN)
    body = f'"\\n" call {_quoted(_CLOSE)}'
    calls = "body" if offer.has_one_call else f"body ({next_mark} body)*"
    if offer.is_required:
        return (f"answer: {mark} {calls}", f"body: {body}")
    return (
        f"answer: WORDS | words_before {calls}",
        f"body: {body}",
        f"words_before[suffix={mark}]: {_ANYTHING}",
        f"WORDS: ~({_ANYTHING} {mark} {_ANYTHING})",
    )


def _listed(offer: Offer) -> Sequence[str]:
    calls = "call" if offer.has_one_call else 'call (", " call)*'
    return (f'answer: "[" {calls} "]"',)


def _call(index: int, tool: Tool) -> Sequence[str]:
    """One tool's call, and its arguments: a schema's references begin at its own root."""
    schema = tidy_schema({"type": "object", **(tool.function.parameters or {})})
    before = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
    return (
        f'call_{index}: {_quoted(before)} arguments_{index} "}}"',
        f"arguments_{index}: %json {json.dumps(schema)}",
    )


def _quoted(text: str) -> str:
    return json.dumps(text)
