"""Typed decoding by threads that know nothing of each other.

Owns the lock around what msgspec learns of a type. msgspec (0.22) learns when it first meets the
type, without a lock; a second thread that comes meanwhile reads what is half written, and the
process is gone. All typed decoding goes through here; untyped decoding and encoding need not.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")

_lock = threading.Lock()
_learned: set[Any] = set()


def _learn(kind: Any) -> None:
    if kind in _learned:  # only what is learned whole is in there
        return
    with _lock:
        if kind not in _learned:
            msgspec.json.Decoder(kind)  # also what the other formats, and `convert`, go by
            _learned.add(kind)


def convert(value: Any, kind: type[Kind], *, strict: bool = True) -> Kind:
    """`msgspec.convert`."""
    _learn(kind)
    return msgspec.convert(value, kind, strict=strict)


def decode_json(raw: bytes | bytearray | str, kind: type[Kind]) -> Kind:
    """`msgspec.json.decode`."""
    _learn(kind)
    return msgspec.json.decode(raw, type=kind)


def decode_msgpack(raw: bytes | bytearray | memoryview, kind: type[Kind]) -> Kind:
    """`msgspec.msgpack.decode`."""
    _learn(kind)
    return msgspec.msgpack.decode(raw, type=kind)
