"""Checking a configuration against the headers of its weights, before a model is built from it.

Owns the names that transformers and diffusers give to fields for layer counts, expert counts and
widths, and the limits that tensor headers imply. Knows no architecture: a configuration that passes
may still be refused by the model's own checks.

A model has a tensor for each of its layers, and tensors for each layer's experts, or one stacked
tensor whose first dimension is their number; so a damaged or forged field cannot make it build
millions of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import TensorInfo

_PACKED = 8
"""The most values packed into one stored number: eight 4-bit values in an int32."""
_MIXED = 4
"""How many times layers times experts may exceed the tensors: dense layers have no experts."""
_MAX_DEPTH = 16

_ANY_LAYERS = 64
_ANY_EXPERTS = 1024
_ANY_WIDTH = 2**18
"""Lower values always pass: they are cheap to build, and a field may have no effect."""

_LAYERS = re.compile(
    r"(?!max_|\w*(?<!layers)_per_)"  # such as one width per stage
    r"(\w+_)?(layers?|blocks?|stages?|depths?|layers_per_block)"
)
_EXPERTS = re.compile(r"(\w+_)?experts")
_WIDTHS = re.compile(
    r"(?!\w*(max_pos|window|chunk|cache|batch|buffer|sample|segment))"  # lengths and buffers
    r"((\w+_)?(dims?|size|width|channels|heads?|bins|buckets|features|inner|embd|positions)"
    r"|d_\w+|num_position_embeddings|scale_factor)"
)


def check_plausible(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], file: str = "config.json"
) -> None:
    """Raise `WeightsError`, naming `file`, field and value, if `config` cannot match `tensors`."""
    if not tensors:
        return
    shapes = [info.shape for info in tensors.values()]
    num_parts = sum(max(1, shape[0]) if len(shape) > 2 else 1 for shape in shapes)
    widest = max((dim for shape in shapes for dim in shape), default=0)

    def check(field: str, count: float, most: int, held: str) -> None:
        if count > most:
            raise WeightsError(f"{file}: {field} is {count}, but its weights have {held}.")

    for where, fields in _objects(config):
        num_layers = 1
        for name, count in _counts(fields, _LAYERS):
            most = max(len(tensors), _ANY_LAYERS)
            check(f"{where}{name}", count, most, f"{len(tensors)} tensors")
            num_layers = max(num_layers, int(count))
        for name, count in _counts(fields, _EXPERTS):
            most = max(_MIXED * num_parts, _ANY_EXPERTS) // num_layers
            check(f"{where}{name}", count, most, f"{num_parts} matrices for {num_layers} layers")
        for name, width in _counts(fields, _WIDTHS):
            most = max(_PACKED * widest, _ANY_WIDTH)
            check(f"{where}{name}", width, most, f"no dimension above {widest}")


def _objects(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and its nested objects, each with the path prefix of its fields."""
    waiting: list[tuple[str, int, Mapping[str, Any]]] = [("", 0, config)]
    while waiting:
        where, depth, fields = waiting.pop()
        yield where, fields
        waiting += [
            (f"{where}{name}.", depth + 1, value)
            for name, value in fields.items()
            if isinstance(value, Mapping) and depth < _MAX_DEPTH
        ]


def _counts(fields: Mapping[str, Any], names: re.Pattern[str]) -> Iterator[tuple[str, int | float]]:
    """The numbers in fields matching `names`; for a list, its largest."""
    for name, value in fields.items():
        if not names.fullmatch(name):
            continue
        values = value if isinstance(value, list) else [value]
        numbers = [each for each in values if isinstance(each, int | float) and each > 0]
        if numbers:
            yield name, max(numbers)
