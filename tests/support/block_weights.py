"""Random weights in blocks of integers: any codes, sane scales."""

from __future__ import annotations

import numpy as np
import torch

from triptych.core.block_formats import FORMATS
from triptych.core.runtime.kernels.dequantize import PackedTensor

_SCALE_OFFSETS = {"q6_k": (208,)}
_WITH_MINIMA = ("q4_1", "q5_1", "q4_k", "q5_k")


def random_blocks(name: str, num_outputs: int, num_inputs: int, *, seed: int) -> PackedTensor:
    """A matrix whose values are of the order of 0.1."""
    form, rng = FORMATS[name], np.random.default_rng(seed)
    size = num_outputs * form.row_bytes(num_inputs)
    blocks = rng.integers(0, 256, size, dtype=np.uint8).reshape(-1, form.num_bytes)
    largest = {
        "q8_0": 128, "q6_k": 32 * 128, "q4_k": 16 * 64, "q5_k": 32 * 64,
        "iq4_nl": 128, "iq4_xs": 32 * 128,
    }.get(name, 16)  # fmt: skip
    if name == "mxfp4":
        blocks[:, 0] = rng.integers(120, 125, len(blocks))
        return PackedTensor(torch.from_numpy(blocks).view(num_outputs, -1), form)
    for offset in _SCALE_OFFSETS.get(name, (0, 2) if name in _WITH_MINIMA else (0,)):
        scales = (rng.standard_normal((len(blocks), 1)) / largest / 4).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return PackedTensor(torch.from_numpy(blocks).view(num_outputs, -1), form)
