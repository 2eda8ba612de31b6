"""Writes long responses as JSON in stretches.

Owns the JSON of responses that may have a hundred thousand entries: pydantic writes a document in
one call that blocks all other threads, including the event loop. Knows no response.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, RootModel, TypeAdapter

_STRETCH = 64
"""Entries of a list that are written in one call."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def write_json(document: BaseModel) -> bytes:
    """Write `model_dump_json(exclude_unset=True)`, letting other threads run meanwhile."""
    return b"".join(json_stretches(document))


def json_stretches(value: Any) -> Iterator[bytes]:
    """Yield the JSON of `value` in pieces, without unset fields of models."""
    if isinstance(value, BaseModel) and _is_plain(type(value)):
        is_set = value.model_fields_set
        yield from _object((name, field) for name, field in vars(value).items() if name in is_set)
    elif isinstance(value, dict):
        yield from _object(value.items())
    elif isinstance(value, list | tuple):
        yield from _array(value)
    else:
        yield _written(value)


@cache
def _is_plain(kind: type[BaseModel]) -> bool:
    """Whether the JSON of such a model consists of its fields only."""
    own = kind.__pydantic_decorators__
    if own.field_serializers or own.model_serializers or own.computed_fields:
        return False
    if issubclass(kind, RootModel) or kind.model_config.get("extra") == "allow":
        return False
    return not any(field.exclude for field in kind.model_fields.values())


def _written(value: Any) -> bytes:
    return _ANY.dump_json(value, exclude_unset=True)


def _object(fields: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    mark = b"{"
    for name, value in fields:
        yield mark + _written({name: None})[1 : -len(b"null}")]  # keys may be numbers
        yield from json_stretches(value)
        mark = b","
    yield b"{}" if mark == b"{" else b"}"


def _array(values: Sequence[Any]) -> Iterator[bytes]:
    """Yield an array in pieces; entries of a short array may be long themselves."""
    mark = b"["
    if len(values) <= _STRETCH:
        for value in values:
            yield mark
            yield from json_stretches(value)
            mark = b","
    else:
        for start in range(0, len(values), _STRETCH):
            yield mark + _written(values[start : start + _STRETCH])[1:-1]
            mark = b","
    yield b"[]" if mark == b"[" else b"]"
