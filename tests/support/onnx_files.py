"""ONNX files, as far as our reader looks at them, written without the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    head = b""
    while value > 0x7F:
        head += bytes([value & 0x7F | 0x80])
        value >>= 7
    return head + bytes([value])


def initializer(name: str, tensor: npt.ArrayLike) -> bytes:
    values = np.asarray(tensor, "<f4")
    dims = b"".join(field(1, size) for size in values.shape)
    raw = values.tobytes()
    return field(5, dims + field(2, 1) + field(8, name.encode()) + field(9, raw))


def node(operator: str, path: str, *inputs: str) -> bytes:
    named = b"".join(field(1, name.encode()) for name in inputs)
    return field(1, named + field(3, path.encode()) + field(4, operator.encode()))


def onnx_file(folder: Path, *parts: bytes) -> Path:
    file = folder / "model.onnx"
    file.write_bytes(field(1, 9) + field(2, b"test") + field(7, b"".join(parts)))
    return file
