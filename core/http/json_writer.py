"""Long answers as JSON, written a stretch at a time.

Owns the JSON of answers that may have a hundred thousand entries: pydantic writes a document in one
call, and no other thread runs meanwhile, the event loop's neither. Knows no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, RootModel, TypeAdapter

_STRETCH = 64
"""Entries of a list that are written at once."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def write_json(document: BaseModel) -> bytes:
    """What `model_dump_json(exclude_unset=True)` writes; a thread that does it lets others run."""
    return b"".join(json_stretches(document))


def json_stretches(value: Any) -> Iterator[bytes]:
    """The JSON of `value`, less the fields of models that were not set, in pieces."""
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
    """Whether the JSON of such a model is that of its fields, and nothing else."""
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
        yield mark + _written({name: None})[1 : -len(b"null}")]  # a name may be a number
        yield from json_stretches(value)
        mark = b","
    yield b"{}" if mark == b"{" else b"}"


def _array(values: Sequence[Any]) -> Iterator[bytes]:
    """A short array's entries may be long themselves."""
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
