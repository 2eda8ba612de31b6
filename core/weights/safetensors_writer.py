"""Writing safetensors tensor by tensor, so that a conversion never holds a whole model.

Owns the file's layout: all shapes are known first, data is appended in that order. Knows neither
torch nor where the numbers come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from triptych.core.weights.layout import DTYPE_BYTES

Chunks = Iterable[np.ndarray[Any, np.dtype[Any]]]


def write_safetensors(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    chunks_of: Callable[[str], Chunks],
) -> None:
    """Write one tensor of type `dtype` per name; `chunks_of(name)` yields its data in order.

    Chunks are arrays whose bytes are the tensor's bytes. Raises `OSError` as the disk does.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name in shapes:
            for chunk in chunks_of(name):
                stream.write(np.ascontiguousarray(chunk).data)
        assert stream.tell() == 8 + len(raw) + position, "chunks do not add up to their shapes"
