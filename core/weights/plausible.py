"""Whether a configuration can be that of the weights beside it, before anything is built by it.

Owns the fields of configurations that say how often parts of a model are repeated and how wide they
are, by the names that transformers and diffusers give them, and what the headers of tensors allow.
Knows no architecture: what fits here may still be refused by the model's own checks.

A model has a tensor for each of its layers, and some for each layer's experts, or one whose first
dimension counts these; so a field that was damaged or made up cannot have millions of them built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import TensorInfo

_PACKED = 8
"""The most values of a row that one number of a file holds: four bits each in a word of 32."""
_MIXED = 4
"""By how much layers times experts may exceed what there are tensors for: some layers have none."""
_MAX_DEPTH = 16

_LAYERS = re.compile(
    r"(n|num)_(\w+_)?(layers?|blocks?|stages)|((en|de)coder|transformer|\w*hidden)_layers"
    r"|layers_per_block|transformer_layers_per_block|depths?"
)
_EXPERTS = re.compile(r"(n|num)_(\w+_)?experts")
_WIDTHS = re.compile(
    r"(\w+_)?(hidden|intermediate|vocab|embedding|ffn|inner|mlp|projection)_(size|dim)"
    r"|(\w+_)?(head|ffn|attention)_dim|d_model|d_ff|d_kv|n_embd|n_inner|n_heads?"
    r"|(\w+_)?num_(\w+_)?heads|(en|de)coder_attention_heads"
)


def check_plausible(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], file: str = "config.json"
) -> None:
    """Raise `WeightsError`, naming `file`, field and value, if `tensors` cannot be of `config`."""
    if not tensors:
        return
    shapes = [info.shape for info in tensors.values()]
    num_parts = sum(max(1, shape[0]) if len(shape) > 2 else 1 for shape in shapes)
    widest = _PACKED * max((dim for shape in shapes for dim in shape), default=0)
    for where, fields in _objects(config):
        layers = dict(_counts(fields, _LAYERS))
        for name, count in layers.items():
            if count > len(tensors):
                raise WeightsError(
                    f"{file}: {where}{name} is {count}, but its files have {len(tensors)} tensors."
                )
        num_layers = max(1, *layers.values()) if layers else 1
        for name, count in _counts(fields, _EXPERTS):
            if count * num_layers > _MIXED * num_parts:
                raise WeightsError(
                    f"{file}: {where}{name} is {count}, but its files have {len(tensors)} tensors"
                    f" for {num_layers} layers of so many experts."
                )
        for name, width in _counts(fields, _WIDTHS):
            if width > widest:
                raise WeightsError(
                    f"{file}: {where}{name} is {width}, but the widest tensor of its files has"
                    f" {widest // _PACKED}."
                )


def _objects(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration and those of its parts, with the path before the names of their fields."""
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
    """The numbers in fields of such names, the largest where there is one for each stage."""
    for name, value in fields.items():
        if not names.fullmatch(name):
            continue
        values = value if isinstance(value, list) else [value]
        numbers = [each for each in values if isinstance(each, int | float)]
        if numbers:
            yield name, max(numbers)
