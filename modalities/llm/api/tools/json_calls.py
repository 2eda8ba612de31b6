"""Calls written as JSON: marked objects or lists of them, named arguments, bare objects.

Owns three ways in which families write calls as JSON, and their marks. A call begins when its name
is known; its arguments are passed on as they arrive, as far as they are valid JSON.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from triptych.modalities.llm.api.tools.json_mending import JsonMender
from triptych.modalities.llm.api.tools.json_text import json_text, json_value, load_json
from triptych.modalities.llm.api.tools.pieces import (
    AnswerPiece,
    CallArguments,
    CallStart,
    Reading,
    ToolSchemas,
    Words,
)
from triptych.modalities.llm.api.tools.source import TextSource

_ARGUMENTS = ("arguments", "parameters")
_NUMBERED = re.compile(r"[:\[]")
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_FENCES = ("```json", "```", "<tools>")
_FENCE_ENDS = ("```", "</tools>")
_Attempt = Generator[AnswerPiece | None, None, bool]
"""Reads one call; returns whether it was complete."""


@dataclass(frozen=True, slots=True)
class MarkedJson:
    """One of `opens`, `{"name": ..., "arguments": {...}}` or a list of those, one of `closes`.

    With `forgets_marks` an answer may also begin with calls of known tools that have none.
    """

    opens: Sequence[str]
    closes: Sequence[str] = ()
    forgets_marks: bool = False

    def __call__(self, source: TextSource, tools: ToolSchemas) -> Reading:
        """Implements the `ReadCalls` protocol."""
        while self.forgets_marks and (yield from _unmarked_call(source, tools)):
            pass
        while mark := (yield from source.until(self.opens, Words)):
            source.taken = mark
            yield from source.spaces()
            is_whole = yield from self._marked_calls(source)
            if source.taken and not is_whole:
                yield Words(source.taken)
                continue
            if not is_whole:
                yield from source.skip((*self.opens, *self.closes))
            yield from source.closing(self.closes)
            yield from source.spaces()

    def _marked_calls(self, source: TextSource) -> _Attempt:
        """The calls after one mark, mostly one. Surplus brackets are dropped."""
        while (yield from json_calls(source)):
            source.taken = ""
            yield from source.spaces()
            while self.closes and (yield from source.any_of(("}", "]", ",", ";"))):
                yield from source.spaces()
            source.taken = ""
            if (yield from source.next()) != "{":
                return True
        return False


@dataclass(frozen=True, slots=True)
class NamedJson:
    """One of `opens`, the name, `separator`, the arguments as an object, one of `closes`.

    `ignored` are marks around calls. The name is the part after `prefix`, up to a colon or a
    bracket, after which some models number their calls.
    """

    opens: Sequence[str]
    separator: str
    closes: Sequence[str]
    ignored: Sequence[str] = ()
    prefix: str = ""
    has_fence: bool = False

    def __call__(self, source: TextSource, tools: ToolSchemas) -> Reading:
        """Implements the `ReadCalls` protocol."""
        marks = (*self.opens, *self.ignored)
        while mark := (yield from source.until(marks, Words)):
            if mark in self.opens and not (yield from self._call(source, mark)):
                continue
            yield from source.spaces()

    def _call(self, source: TextSource, mark: str) -> _Attempt:
        source.taken = mark
        name, separator = yield from source.before((self.separator,))
        name = _NUMBERED.split(name.strip().removeprefix(self.prefix), maxsplit=1)[0]
        if self.has_fence and separator:
            name = yield from self._fenced_name(source)
        yield from source.spaces()
        if not separator or not name or (yield from source.next()) != "{":
            yield Words(source.taken)
            return False
        yield CallStart(name)
        is_whole = yield from json_text(source, CallArguments)
        if not is_whole:
            yield from source.skip((*self.opens, *self.closes, *self.ignored))
        yield from source.spaces()
        if is_whole and self.has_fence:
            yield from source.begins("```")
            yield from source.spaces()
        yield from source.closing(self.closes)
        return is_whole

    def _fenced_name(self, source: TextSource) -> Generator[None, None, str]:
        """The name on its own line before a fence of JSON."""
        name, _ = yield from source.before(("```json",))
        return name.strip()


def bare_json(source: TextSource, tools: ToolSchemas) -> Reading:
    """Llama 3 and 4: the answer is one or several calls of known tools.

    Llama 4 may write text between its own marks first. A semicolon between calls is ignored.
    """
    source.taken = ""
    yield from source.spaces()
    mark = yield from source.any_of(("<|python_tag|>", _PYTHON_START))
    yield from source.spaces()
    is_call = yield from _begins_call(source)
    if mark == _PYTHON_START and not is_call:
        yield from source.until((_PYTHON_END,), Words)
        source.taken = ""
        yield from source.spaces()
        is_call = yield from _begins_call(source)
    while is_call and (yield from _object(source, tools)):
        yield from source.spaces()
        if (yield from source.begins(_PYTHON_END)):
            source.taken = ""
        yield from source.spaces()
        yield from source.begins(";")
        yield from source.spaces()
        is_call = yield from _begins_call(source)
    if source.taken:
        yield Words(source.taken)
    yield from source.until((), Words)


def listed_json(source: TextSource, tools: ToolSchemas) -> Reading:
    """Read an answer that is a call or a list of calls, as a grammar forces it."""
    source.taken = ""
    yield from source.spaces()
    yield from json_calls(source)
    if source.taken:
        yield Words(source.taken)
    yield from source.until((), Words)


def _unmarked_call(source: TextSource, known: ToolSchemas) -> _Attempt:
    """A call as small models write it: the bare object, or in a fence."""
    source.taken = ""
    yield from source.spaces()
    fence = yield from source.any_of(_FENCES)
    yield from source.spaces()
    if not (yield from _begins_call(source)):
        if source.taken:
            yield Words(source.taken)
        return False
    if not (yield from _object(source, known)):
        if source.taken:
            yield Words(source.taken)
        else:
            yield from source.skip(())
        return False
    if fence:
        yield from source.spaces()
        yield from source.closing(_FENCE_ENDS)
    return True


def _begins_call(source: TextSource) -> Generator[None, None, bool]:
    """Whether an object that may be a call is next: its first key is the name, or its type.

    Other JSON is text as soon as a key shows it. Reads nothing.
    """
    before = len(source.taken)
    is_call = yield from source.begins("{")
    yield from source.spaces()
    parts = ['"name"']
    if is_call and (yield from source.begins('"type"')):
        parts = [":", '"function"', ",", *parts]
    for part in parts:
        yield from source.spaces()
        is_call = is_call and (yield from source.begins(part))
    source.put_back(source.taken[before:])
    return is_call


def json_calls(source: TextSource, known: ToolSchemas | None = None) -> _Attempt:
    """A call, or a list of calls. If no call began, the source's `taken` is the text read."""
    if not (yield from source.begins("[")):
        return (yield from _object(source, known))
    while True:
        yield from source.spaces()
        if not (yield from _object(source, known)):
            return False
        yield from source.spaces()
        if not (yield from source.begins(",")):
            return (yield from source.begins("]"))


@dataclass(slots=True)
class _OpenCall:
    """The state of a call that is being read; keeps arguments that precede the name."""

    name: str = ""
    early: str = ""
    has_begun: bool = False


def _object(source: TextSource, known: ToolSchemas | None) -> _Attempt:
    """`{"name": ..., "arguments": ...}`, in any order and with other keys; only `known` names.

    An object with a `known` name but without arguments is not a call. If no call began, the
    source's `taken` is the text read.
    """
    call, separator = _OpenCall(), "{"
    while (yield from source.begins(separator)) and (yield from _field(source, call, known)):
        yield from source.spaces()
        separator = ","
        if call.name and (yield from source.begins("}")):
            arguments = _whole_arguments(call.early, has_none=known is None)
            if not call.has_begun and arguments is not None:
                yield CallStart(call.name)
                yield CallArguments(arguments)
                call.has_begun = True
            if call.has_begun:
                source.taken = ""
            return call.has_begun
    if call.has_begun:
        source.taken = ""
    return False


def _field(source: TextSource, call: _OpenCall, known: ToolSchemas | None) -> _Attempt:
    """A key and its value."""
    key = yield from _key(source)
    yield from source.spaces()
    is_first = key in _ARGUMENTS and not call.has_begun and not call.early
    if is_first and call.name and (yield from source.next()) == "{":
        call.has_begun = True
        yield CallStart(call.name)
        return (yield from json_text(source, CallArguments))
    value = yield from json_value(source)
    if value is None:
        return False
    if key == "name" and not call.name:
        call.name = _string(value)
        return bool(call.name) and (known is None or call.name in known)
    if is_first:
        call.early = value
    return True


def _key(source: TextSource) -> Generator[None, None, str]:
    """A key with its colon; empty if there is none."""
    key = yield from json_value(source)
    yield from source.spaces()
    return _string(key or "") if (yield from source.begins(":")) else ""


def _whole_arguments(text: str, *, has_none: bool) -> str | None:
    """Arguments that arrived at once: an object, an object in a string, or empty; else `None`.

    An empty text counts as no arguments if `has_none`.
    """
    value = load_json(text)
    if isinstance(value, str):
        text, value = value, load_json(value)
    if isinstance(value, dict):
        return JsonMender.mend(text)
    is_empty = text in ("", "null") if text or has_none else False
    return "{}" if is_empty else None


def _string(text: str) -> str:
    value = load_json(text)
    return value if isinstance(value, str) else ""
