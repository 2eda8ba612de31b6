"""Thread-safe typed decoding with msgspec.

Owns the lock around msgspec's type cache. msgspec (0.22) fills it on the first use of a type,
without a lock; a second thread that decodes the same type meanwhile reads half-written data and
crashes the process. All typed decoding goes through here; untyped decoding and encoding need not.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")

_MAX_SHOWN_CHARS = 40
_PLACE = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

_lock = threading.Lock()
_learned: set[Any] = set()


def _learn(kind: Any) -> None:
    if kind in _learned:  # added only once the cache is complete
        return
    with _lock:
        if kind not in _learned:
            msgspec.json.Decoder(kind)  # fills the cache that all formats and `convert` use
            _learned.add(kind)


def convert(value: Any, kind: type[Kind], *, strict: bool = True) -> Kind:
    """The thread-safe form of `msgspec.convert`."""
    _learn(kind)
    return msgspec.convert(value, kind, strict=strict)


def decode_json(raw: bytes | bytearray | str, kind: type[Kind]) -> Kind:
    """The thread-safe form of `msgspec.json.decode`."""
    _learn(kind)
    return msgspec.json.decode(raw, type=kind)


def decode_msgpack(raw: bytes | bytearray | memoryview, kind: type[Kind]) -> Kind:
    """The thread-safe form of `msgspec.msgpack.decode`."""
    _learn(kind)
    return msgspec.msgpack.decode(raw, type=kind)


def describe_mismatch(error: msgspec.ValidationError, value: Any) -> str:
    """Describe why `convert` rejected `value`: the field, its value and the expected type."""
    found = _PLACE.fullmatch(str(error))
    if found is None:
        return str(error)
    reason, path = found.groups()
    for name, index in _STEP.findall(path):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and index and int(index) < len(value):
            value = value[int(index)]
        else:  # a path that names no single value, such as any entry of a list
            return str(error)
    shown = repr(value)
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = f"{shown[:_MAX_SHOWN_CHARS]}..."
    return f"{path.removeprefix('.')} is {shown}: {reason[:1].lower()}{reason[1:]}"
