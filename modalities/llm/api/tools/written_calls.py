"""Calls whose arguments are not JSON: tagged parameters, and Python.

Owns the conversion of their values to JSON by the parameter's type in the tool's schema.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.modalities.llm.api.tools.pieces import (
    AnswerPiece,
    CallArguments,
    CallStart,
    Reading,
    ToolSchemas,
    Words,
)
from triptych.modalities.llm.api.tools.source import TextSource

_MAX_PYTHON_CHARS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParameters:
    """`open`, the name up to `name_end` or a tag, parameters between tags, and one of `closes`.

    A parameter is `key_open` key `key_close` `value_open` value `value_close`. A value is JSON
    where the schema does not say it is a string.
    """

    open: str
    name_open: str = ""
    name_end: str
    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    closes: tuple[str, ...]

    def __call__(self, source: TextSource, tools: ToolSchemas) -> Reading:
        """Implements the `ReadCalls` protocol."""
        tags = (self.key_open, *self.closes)
        while mark := (yield from source.until((self.open,), Words)):
            source.taken = mark
            yield from source.spaces()
            is_named = not self.name_open or (yield from source.begins(self.name_open))
            ends = (self.name_end, *tags)
            name, end = (yield from source.before(ends)) if is_named else ("", "")
            if end in tags:
                source.put_back(end)
            if len(name.split()) != 1 or not end:
                yield Words(source.taken)
                continue
            yield CallStart(name.strip())
            yield from self._parameters(source, tools.get(name.strip(), {}))
            while (yield from source.closing(self.closes)):
                yield from source.spaces()

    def _parameters(self, source: TextSource, schema: Mapping[str, Any]) -> Reading:
        separator = "{"
        yield from source.spaces()
        while (yield from source.begins(self.key_open)):
            key, _ = yield from source.before((self.key_close,))
            if self.value_open:
                yield from source.spaces()
                yield from source.begins(self.value_open)
            value, end = yield from source.before((self.value_close,))
            if not end:  # the text is over
                return
            entry = f"{json.dumps(key.strip())}: {_as_json(value, _kinds_of(schema, key.strip()))}"
            yield CallArguments(separator + entry)
            separator = ", "
            yield from source.spaces()
        yield CallArguments("{}" if separator == "{" else "}")


def pythonic(source: TextSource, tools: ToolSchemas) -> Reading:
    """Llama 4: the answer is `[name(key=value), ...]`, with names of known tools only."""
    source.taken = ""
    yield from source.spaces()
    yield from source.begins("<|python_start|>")
    yield from source.spaces()
    if (yield from source.next()) == "[":
        calls = yield from _python_calls(source, tools)
        if calls is None:
            yield Words(source.taken)
        for name, arguments in calls or ():
            yield CallStart(name)
            yield CallArguments(json.dumps(arguments, ensure_ascii=False))
        yield from source.spaces()
        yield from source.begins("<|python_end|>")
    elif source.taken:
        yield Words(source.taken)
    yield from source.until((), Words)


def _python_calls(
    source: TextSource, tools: ToolSchemas
) -> Generator[AnswerPiece | None, None, list[tuple[str, dict[str, Any]]] | None]:
    """The calls of a complete list; `None` if it is not a list of calls."""
    text = ""
    while len(text) < _MAX_PYTHON_CHARS:
        part, end = yield from source.before(("]",))
        text += part + end
        if not end:
            return None
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue  # a bracket of a value
        return _calls_of(tree, tools)
    return None


def _calls_of(tree: ast.expr, tools: ToolSchemas) -> list[tuple[str, dict[str, Any]]] | None:
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or call.args:
            return None
        name = ast.unparse(call.func)
        try:
            arguments = {str(each.arg): _literal(each.value) for each in call.keywords}
            json.dumps(arguments, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            return None
        if name not in tools or "None" in arguments:  # `**more`
            return None
        calls.append((name, arguments))
    return calls


_JSON_NAMES = {"true": "True", "false": "False", "null": "None"}
_JSON_OF_PYTHON = {python: name for name, python in _JSON_NAMES.items()}
_EMPTY = ("null", "None")
_OPENED = {"[": "array", "{": "object"}
_UNIONS = ("anyOf", "oneOf")


def _literal(value: ast.expr) -> Any:
    """A Python literal, which may contain JSON's `true`, `false` and `null`."""
    for node in ast.walk(value):
        if isinstance(node, ast.Name):
            node.id = _JSON_NAMES.get(node.id, node.id)
    return ast.literal_eval(ast.unparse(value))


def _kinds_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that a value may have; empty if the schema does not say."""
    properties = schema.get("properties")
    entry = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(entry, Mapping):
        return frozenset()
    entries = [entry, *(part for word in _UNIONS for part in _as_list(entry.get(word)))]
    kinds = (kind for each in entries if isinstance(each, Mapping) for kind in _types(each))
    return frozenset(kind for kind in kinds if isinstance(kind, str))


def _types(entry: Mapping[str, Any]) -> Sequence[Any]:
    given = entry.get("type")
    return given if isinstance(given, list) else [given]


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _is_text(word: str, kinds: frozenset[str]) -> bool:
    """Whether a value is a string and not a literal of another type in the schema."""
    if "string" not in kinds or (word in _EMPTY and "null" in kinds):
        return False
    return _OPENED.get(word[:1]) not in kinds


def _as_json(value: str, kinds: frozenset[str]) -> str:
    """A value as JSON, without one line break at either end, which belongs to the tags."""
    value = value.removeprefix("\n").removesuffix("\n")
    word = value.strip()
    if not _is_text(word, kinds):
        try:
            return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
        if word in _JSON_OF_PYTHON and not kinds.isdisjoint({"boolean", "null"}):
            return _JSON_OF_PYTHON[word]
    return json.dumps(value, ensure_ascii=False)
