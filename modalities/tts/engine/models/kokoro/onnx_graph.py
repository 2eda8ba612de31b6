"""The weights in an ONNX file and the nodes that use them, without the onnx package.

Owns as much of the protobuf wire format as that takes: nothing is executed, nothing is copied
before it is asked for. Knows no model.

Formats: https://protobuf.dev/programming-guides/encoding and onnx.proto (ModelProto.graph is
field 7; GraphProto has nodes in 1 and initialisers in 5).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triptych.core.errors import WeightsError

FLOAT = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
Span = tuple[int, int]
"""Where in the file a field's bytes are."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: `path` is where in the module tree it was traced, as /a/b.0/Conv."""

    operator: str
    path: str
    inputs: tuple[str, ...]


class OnnxGraph:
    """A mapped ONNX file. Only float32 initialisers are offered."""

    def __init__(self, file: Path) -> None:
        """Raises `WeightsError` when the file is not an ONNX model."""
        with file.open("rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read()
        except (IndexError, UnicodeDecodeError, KeyError) as error:
            raise WeightsError(f"{file.name} is no whole ONNX file.") from error

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """An initialiser, as a read-only view into the file."""
        shape, (start, end) = self.floats[name]
        if end - start != 4 * math.prod(shape):
            raise WeightsError(f"The ONNX tensor {name!r} does not hold what its shape says.")
        flat = np.frombuffer(self._data, np.dtype("<f4"), math.prod(shape), start)
        return flat.reshape(shape)

    def _read(self) -> None:
        self.floats: dict[str, tuple[tuple[int, ...], Span]] = {}
        self.nodes: list[Node] = []
        for number, graph in self._fields((0, len(self._data))):
            if number == 7:
                for kind, span in self._fields(_as_span(graph)):
                    if kind == 1:
                        self.nodes.append(self._node(_as_span(span)))
                    elif kind == 5:
                        self._add_initialiser(_as_span(span))

    def _node(self, span: Span) -> Node:
        texts: dict[int, list[str]] = {1: [], 3: [], 4: []}
        for number, value in self._fields(span):
            if number in texts:
                texts[number].append(self._text(_as_span(value)))
        return Node("".join(texts[4]), "".join(texts[3]), tuple(texts[1]))

    def _add_initialiser(self, span: Span) -> None:
        values = dict[int, int | Span]()
        shape: list[int] = []
        for number, value in self._fields(span):
            if number == 1:
                shape.extend(self._dimensions(value))
            else:
                values[number] = value
        if values.get(2) == FLOAT and 9 in values:
            name = self._text(_as_span(values[8]))
            self.floats[name] = (tuple(shape), _as_span(values[9]))

    def _dimensions(self, value: int | Span) -> Iterator[int]:
        """One dimension, or a packed list of them."""
        if isinstance(value, int):
            yield value
            return
        position, end = value
        while position < end:
            size, position = self._varint(position)
            yield size

    def _fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        """Field numbers and values of the message in `span`."""
        position, end = span
        while position < end:
            tag, position = self._varint(position)
            wire = tag & 7
            value: int | Span
            if wire == _VARINT:
                value, position = self._varint(position)
            else:
                length = _FIXED_BYTES.get(wire)
                if wire == _BYTES:
                    length, position = self._varint(position)
                if length is None or position + length > end:
                    raise IndexError("a field leaves its message")
                value = (position, position + length)
                position += length
            yield tag >> 3, value

    def _varint(self, position: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = self._data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, position
            if shift > 63:
                raise IndexError("an endless number")

    def _text(self, span: Span) -> str:
        return self._data[slice(*span)].decode()


def _as_span(value: int | Span) -> Span:
    if isinstance(value, int):
        raise IndexError("a number where a message should be")
    return value
