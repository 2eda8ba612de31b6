"""Models of any size with random weights, without files of their size.

A checkpoint's folder gets real headers over a hole, and inside `random_values` the values are made
on the device, as a checkpoint would be read. So loading goes its usual way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import DTYPE_BYTES, TensorInfo

STD = 0.02
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""The type of each tensor, as safetensors names it, and its shape."""

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}


def shapes_of(module: nn.Module, dtype: str = "BF16") -> Shapes:
    """The tensors of a module, which may be on the meta device."""
    found: Shapes = {}
    seen: set[int] = set()
    for name, each in module.state_dict(keep_vars=True).items():
        if id(each) not in seen:  # a tensor of two names is stored once
            found[name] = (dtype, tuple(each.shape))
        seen.add(id(each))
    return found


def in_float8(shapes: Shapes) -> Shapes:
    """The same checkpoint with the matrices of its layers in float8, a scale for each output."""
    found: Shapes = {}
    for name, (dtype, shape) in shapes.items():
        if ".layers." in name and len(shape) == 2:
            found[name] = ("F8_E4M3", shape)
            found[f"{name}_scale"] = ("F32", (shape[0], 1))
        else:
            found[name] = (dtype, shape)
    return found


def write_folder(folder: Path, stem: str, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Write a checkpoint's configuration and headers; its data is a hole in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@contextmanager
def random_values(device: torch.device) -> Iterator[None]:
    """Inside, every checkpoint has random values, made on the device."""
    read = Checkpoint._map
    generator = torch.Generator(device).manual_seed(0)

    def make(checkpoint: Checkpoint, info: TensorInfo) -> torch.Tensor:
        return _values(info, generator)

    Checkpoint._map = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoint._map = read  # type: ignore[method-assign]


def _values(info: TensorInfo, generator: torch.Generator) -> torch.Tensor:
    """Values that keep activations at a usual size: ones for norms and small ones for the rest."""
    name, shape, dtype = info.name.lower(), info.shape, _DTYPES[info.dtype]
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=generator.device)
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape, dtype=dtype, device=generator.device)
    if name.endswith("weight_scale"):
        return torch.full(shape, STD, dtype=dtype, device=generator.device)
    is_float8 = dtype.itemsize == 1
    made = torch.empty(shape, dtype=torch.bfloat16 if is_float8 else dtype, device=generator.device)
    return made.normal_(std=1.0 if is_float8 else STD, generator=generator).to(dtype)
