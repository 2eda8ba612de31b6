"""Reads the weights of an ONNX file and the nodes that use them, with protobuf.

Owns the part of ONNX's schema (onnx.proto) that this needs; protobuf skips the other fields. The
onnx package would be a large dependency for four messages. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from triptych.core.errors import WeightsError

FLOAT = 1
_Field = descriptor_pb2.FieldDescriptorProto
_ONE, _MANY = _Field.LABEL_OPTIONAL, _Field.LABEL_REPEATED
_SCHEMA = {
    "TensorProto": {
        "dims": (1, _MANY, _Field.TYPE_INT64),
        "data_type": (2, _ONE, _Field.TYPE_INT32),
        "name": (8, _ONE, _Field.TYPE_STRING),
        "raw_data": (9, _ONE, _Field.TYPE_BYTES),
    },
    "NodeProto": {
        "input": (1, _MANY, _Field.TYPE_STRING),
        "name": (3, _ONE, _Field.TYPE_STRING),
        "op_type": (4, _ONE, _Field.TYPE_STRING),
    },
    "GraphProto": {"node": (1, _MANY, "NodeProto"), "initializer": (5, _MANY, "TensorProto")},
    "ModelProto": {"graph": (7, _ONE, "GraphProto")},
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation; `path` is its place in the traced module tree, as /a/b.0/Conv."""

    operator: str
    path: str
    inputs: tuple[str, ...]


class OnnxGraph:
    """An ONNX file. Only float32 initializers are supported."""

    def __init__(self, file: Path) -> None:
        """Parse `file`. Raises `WeightsError` when it is not an ONNX model."""
        try:
            graph = _model_class().FromString(file.read_bytes()).graph
            self.nodes = [Node(n.op_type, n.name, tuple(n.input)) for n in graph.node]
            self.floats = {
                tensor.name: tensor
                for tensor in graph.initializer
                if tensor.data_type == FLOAT and tensor.HasField("raw_data")
            }
        except (DecodeError, UnicodeDecodeError) as error:
            raise WeightsError(f"{file.name} is not a complete ONNX file.") from error

    def tensor(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """An initializer, read-only."""
        values, shape = self.floats[name].raw_data, tuple(self.floats[name].dims)
        if len(values) != 4 * math.prod(shape):
            raise WeightsError(f"The size of the ONNX tensor {name!r} does not match its shape.")
        return np.frombuffer(values, np.dtype("<f4")).reshape(shape)


def _model_class() -> Any:
    """The protobuf class of ONNX models, built from the schema."""
    file = descriptor_pb2.FileDescriptorProto(name="onnx.proto", package="onnx", syntax="proto2")
    for name, members in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, label, kind) in members.items():
            is_message = isinstance(kind, str)
            message.field.add(
                name=field,
                number=number,
                label=label,
                type=_Field.TYPE_MESSAGE if is_message else kind,
                type_name=f".onnx.{kind}" if is_message else None,
            )
    # A separate pool, because the onnx package registers the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))
